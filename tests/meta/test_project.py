"""What must not drift in the project as a whole: sizes, names, pins, what the pages promise."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import phalanx
from tests.meta.commands import flags, root_command
from tests.meta.source import ROOT, SOURCE, Module

MAX_LINES = 600
SHELL_LANGUAGES = ("", "sh", "bash", "shell", "console")


def too_long(module: Module) -> list[str]:
    """A file that needs more lines than this is two files."""
    num_lines = len(module.lines)
    return [f"{module.path} has {num_lines} lines"] if num_lines > MAX_LINES else []


def shapeless_name(module: Module) -> list[str]:
    """Names that say nothing of the domain: of modules, and of classes."""
    offences = []
    for part in module.path.removesuffix(".py").split("/"):
        if part.strip("_") in ("utils", "util", "helpers", "helper", "misc", "common"):
            offences.append(f"{module.path}: `{part}` says nothing of what is in it")
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.ClassDef)
            and re.search(r"(Manager|Handler|Processor|Helper|Info)$", node.name)
            and module.room != "compat"  # whose names are those of earlier systems
        ):
            offences.append(f"{module.path}:{node.lineno}: `{node.name}` is no noun of the domain")
    return offences


def unfinished(module: Module) -> list[str]:
    """Known limits are sentences with a condition, not notes to oneself."""
    return [
        f"{module.path}:{number}: {found.group()}"
        for number, line in enumerate(module.lines, 1)
        if (found := re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line))
    ]


@pytest.mark.parametrize("rule", [too_long, shapeless_name, unfinished])
def test_a_source_file_is_kept(rule, house):
    offences = [line for module in house for line in rule(module)]
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (too_long, "plan/a.py", "\n" * (MAX_LINES + 1)),
        (shapeless_name, "plan/utils.py", ""),
        (shapeless_name, "plan/_utils/a.py", ""),
        (shapeless_name, "plan/a.py", "class SliceManager: pass"),
        (shapeless_name, "tables/a.py", "class ArrayTableHandler: pass"),
        (unfinished, "plan/a.py", "x = 1  # TODO: y"),
        (unfinished, "plan/a.py", '"""FIXME"""'),
    ],
)
def test_a_planted_offence_is_caught(rule, path, text):
    assert len(rule(Module(path, text))) == 1


@pytest.mark.parametrize("rule", [too_long, shapeless_name, unfinished])
def test_a_plain_file_passes(rule):
    assert rule(Module("plan/tree.py", "class Node: pass\n" * MAX_LINES)) == []


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


def unpinned(project: dict[str, Any], constraints: str) -> list[str]:
    """List direct dependencies, extras included, that have no exact version."""
    wanted = [*project["dependencies"]]
    for extra in project.get("optional-dependencies", {}).values():
        wanted += extra
    names = {canonical(re.match(r"[\w.-]+", requirement).group()) for requirement in wanted}
    return sorted(names - pins(constraints).keys())


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = (ROOT / "constraints.txt").read_text()
    assert unpinned(project, constraints) == []
    assert pins(constraints)["torch"] == "2.13.0"  # no local suffix: the index says which build


def test_a_missing_pin_is_caught():
    project = {
        "dependencies": ["torch>=2.7", "rich"],
        "optional-dependencies": {"x": ["Ray[tune]"]},
    }
    assert unpinned(project, "# versions\ntorch==2.13.0\n") == ["ray", "rich"]


def test_the_package_and_the_project_agree_on_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert phalanx.__version__ == project["version"]


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
    known = {*flags(command), "--help", "-h"}
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
        path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if path.exists()
    ]


def test_pages_name_only_what_exists():
    makefile = (ROOT / "Makefile").read_text()
    mistakes = [
        f"{path.relative_to(ROOT)}: {mistake}"
        for path in pages()
        for mistake in page_mistakes(path.read_text(encoding="utf-8"), root_command(), makefile)
    ]
    assert not mistakes, "\n" + "\n".join(mistakes)


def test_the_readme_shows_the_two_commands():
    spoken = list(spoken_commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert ["make", "train"] in [words[:2] for words in spoken]
    assert ["make", "test"] in [words[:2] for words in spoken]


def test_the_make_targets_that_people_know_are_there():
    known = {"bench", "check", "clean", "help", "test", "train", "venv"}
    assert known <= make_targets((ROOT / "Makefile").read_text())


class Fake:
    """A command as typer would build it, with options ``--data`` and ``--lr``."""

    def __init__(self, *options, **commands):
        self.commands = commands
        self.params = [FakeOption(name) for name in options]


class FakeOption:
    param_type_name = "option"
    secondary_opts = ()

    def __init__(self, name):
        self.opts = (name,)


@pytest.mark.parametrize(
    ("page", "mistakes"),
    [
        ("```bash\n$ phalanx train --data digits --lr 0.1\n```", []),
        (
            "```bash\nphalanx train \\\n  --speed 3\n```",
            ["`phalanx train --speed 3`: there is no option --speed"],
        ),
        ("Run `phalanx fly`.", ["`phalanx fly`: there is no command `fly`"]),
        (
            "Run `.venv/bin/phalanx bench step --lr=3`.",
            ["`phalanx bench step --lr=3`: there is no option --lr"],
        ),
        (
            "`phalanx train [--speed N]`",
            ["`phalanx train [--speed N]`: there is no option --speed"],
        ),
        ('```\nmake train ARGS="--epochs 3"\n```', []),
        ("```\nA=1 make fly && make test\n```", ["`make fly`: no such target"]),
        ("```python\nmake = phalanx.fly\n```", []),
        ("To make it fly, the phalanx must fly.", []),
    ],
)
def test_a_page_that_promises_too_much_is_caught(page, mistakes):
    root = Fake(train=Fake("--data", "--lr"), bench=Fake(step=Fake("--steps")))
    assert page_mistakes(page, root, "train: x\n\ttest\ntest: y\n") == mistakes


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


def test_a_place_on_somebodys_machine_is_caught():
    home = "/" + "home/ann"
    assert PERSONAL_PATH.findall(f"see {home}/x and http://a.org{home} and {home}") == [home, home]
