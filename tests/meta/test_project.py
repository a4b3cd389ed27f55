"""What must not drift in the project as a whole: sizes, names, pins, what the pages promise."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.app import app
from tests.meta.source import ROOT, SOURCE, read_house

MAX_LINES = 650
SHELL_LANGUAGES = ("", "sh", "bash", "shell", "console")


def test_a_file_that_needs_more_lines_is_two_files() -> None:
    lengths = {module.path: len(module.lines) for module in read_house()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


# --- pins -----------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(constraints: str) -> dict[str, str]:
    """Return version by canonical name; a line that is no exact pin is a mistake in the file."""
    found = {}
    for line in constraints.splitlines():
        if line.strip() and not line.startswith("#"):
            name, version = line.split("==")
            found[canonical(name)] = version
    return found


def unpinned(document: dict[str, Any], constraints: str) -> list[str]:
    """List direct dependencies, with extras and groups, that have no exact version."""
    project = document["project"]
    extras = [*project["optional-dependencies"].values(), *document["dependency-groups"].values()]
    wanted = sum(extras, project["dependencies"])
    names = {canonical(re.match(r"[\w.-]+", requirement).group()) for requirement in wanted}
    return sorted(names - pins(constraints).keys())


def test_every_dependency_is_pinned():
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    constraints = (ROOT / "constraints.txt").read_text()
    assert unpinned(document, constraints) == []
    assert pins(constraints)["torch"] == "2.13.0"  # no local suffix: the index says which build


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "py.typed").exists()


# --- what the pages promise -----------------------------------------------------------------------


def shell_lines(page: str) -> Iterator[str]:
    """Yield the lines of a Markdown page that a reader would type: shell blocks, `inline code`."""
    language = None
    prose = []
    continued = ""
    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            language = line.strip().strip("`") if language is None else None
        elif language is None:
            prose.append(line)
        elif language in SHELL_LANGUAGES:
            line = continued + line.strip().removeprefix("$ ")
            continued = line[:-1] if line.endswith("\\") else ""
            if not continued:
                yield line
    yield from re.findall(r"`([^`\n]+)`", "\n".join(prose))


def spoken_commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each `phalanx …` and `make …` on a page, from the program's name on."""
    for line in shell_lines(page):
        for piece in re.split(r"&&|;|\|", line):
            try:
                words = shlex.split(piece, comments=True)
            except ValueError:
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            words = [words[0].rpartition("/")[2], *words[1:]] if words else []
            if words and words[0] in ("phalanx", "make"):
                yield words


def command_mistakes(words: Sequence[str], root: Any) -> list[str]:
    """List what a `phalanx …` line names that does not exist."""
    said = " ".join(words)
    command = root
    rest = list(words[1:])
    while rest and getattr(command, "commands", None) and not rest[0].startswith(("-", "[", "…")):
        if rest[0] not in command.commands:
            return [f"`{said}`: there is no command `{rest[0]}`"]
        command = command.commands[rest.pop(0)]
    known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    known |= {"--help", "-h"}
    options = {found for word in rest for found in re.findall(r"^\[?(--[a-z][a-z-]*)", word)}
    return [f"`{said}`: there is no option {option}" for option in sorted(options - known)]


def make_targets(makefile: str) -> set[str]:
    lines = re.findall(r"^(?:BENCHMARKS := )?([a-z][a-z -]*)(?::|$)", makefile, flags=re.MULTILINE)
    return {target for line in lines for target in line.split()}


def page_mistakes(page: str, root: Any, makefile: str) -> list[str]:
    """List commands, options and make targets on a page that do not exist."""
    mistakes = []
    targets = make_targets(makefile)
    for words in spoken_commands(page):
        if words[0] == "phalanx":
            mistakes += command_mistakes(words, root)
        else:
            named = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
            mistakes += [f"`make {word}`: no such target" for word in named if word not in targets]
    return mistakes


def pages() -> list[Path]:
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
    ]


def test_pages_name_only_what_exists():
    makefile = (ROOT / "Makefile").read_text()
    root = typer.main.get_command(app)
    mistakes = [
        f"{path.relative_to(ROOT)}: {mistake}"
        for path in pages()
        for mistake in page_mistakes(path.read_text(encoding="utf-8"), root, makefile)
    ]
    assert not mistakes, "\n" + "\n".join(mistakes)


def test_the_readme_shows_the_two_commands():
    spoken = list(spoken_commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert ["make", "train"] in [words[:2] for words in spoken]
    assert ["make", "test"] in [words[:2] for words in spoken]


def test_the_make_targets_that_people_know_are_there():
    known = {"bench", "check", "clean", "help", "test", "train", "venv"}
    assert known <= make_targets((ROOT / "Makefile").read_text())


# --- nobody's machine ----------------------------------------------------------------------------

TEXT_FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
PERSONAL_PATH = re.compile(r"(?<![\w.)])/(?:home|root|Users)/\w+")


def test_no_file_names_a_place_on_somebodys_machine():
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for folder in TEXT_FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    offences = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        offences += [f"{path.relative_to(ROOT)}: {found}" for found in PERSONAL_PATH.findall(text)]
    assert not offences, "\n" + "\n".join(offences)
