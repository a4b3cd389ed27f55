"""The site: its reference is complete, its links lead somewhere, it builds without a warning."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.source import PACKAGE, ROOT, offered

REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / "benchmarks/README.md", ROOT / "tests/device/README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PUBLIC = [PACKAGE, *(f"{PACKAGE}.{name}" for name in ("codecs", "tables"))]
PUBLIC += [f"{PACKAGE}.compat.{name}" for name in ("multiverso", "mxnet", "oxirs", "torch7")]
ENTRY = re.compile(r"^::: (\S+)(?:\n    options: \{members: \[(.*)\]\})?$", re.MULTILINE)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
OUTSIDE = re.compile(r"<(?:iframe|img|link|script)\b[^>]*https?:[^>]*>")


def named(path: str) -> object:
    """Return what a dotted path of the reference stands for."""
    room, _, name = path.rpartition(".")
    return getattr(importlib.import_module(room), name)


def key_of(room: str, name: str, value: object) -> object:
    """Tell the same object under two names; plain values only by their own name."""
    return f"{room}.{name}" if isinstance(value, (bool, int, str)) else id(value)


def undocumented(entries: list[str]) -> list[str]:
    """List public names that no entry of the reference is."""
    there = {key_of(*path.rpartition(".")[::2], named(path)) for path in entries}
    missing = []
    for room in PUBLIC:
        module = importlib.import_module(room)
        for name in offered(module):
            value = getattr(module, name)
            is_room = isinstance(value, type(module))
            if not is_room and not name.startswith("_") and key_of(room, name, value) not in there:
                missing.append(f"{room}.{name}")
    return missing


def entries() -> list[str]:
    """Return the names that the pages of the reference show; of a module alone, all public ones."""
    found = []
    for page in REFERENCE:
        for room, members in ENTRY.findall(page.read_text(encoding="utf-8")):
            names = members.split(", ") if members else offered(importlib.import_module(room))
            found += [f"{room}.{name}" for name in names]
    return found


def test_the_reference_has_every_public_name_once() -> None:
    found = entries()
    assert undocumented(found) == []
    assert sorted(found) == sorted(set(found))


# --- links ----------------------------------------------------------------------------------------


def prose(page: str) -> str:
    """Return a page without its blocks of code and its `code`."""
    page = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()#]", "", code[0]), page)


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site write them."""
    titles = re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def dead_links(path: Path, text: str) -> list[str]:
    """List relative links of a page that lead to no file, or to no heading of one."""
    dead = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path if not file else (path.parent / file).resolve()
        if not there.exists():
            dead.append(target)
        elif anchor:
            page = text if there == path else there.read_text(encoding="utf-8")
            dead += [target] * (anchor not in anchors(page))
    return dead


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path, path.read_text(encoding="utf-8")) == []


# --- the built site -------------------------------------------------------------------------------


@pytest.mark.night
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = sorted(tmp_path.rglob("*.html"))
    assert not [page.name for page in built if OUTSIDE.search(page.read_text(encoding="utf-8"))]
    reference = "".join(
        page.read_text(encoding="utf-8") for page in (tmp_path / "reference").glob("*.html")
    )
    assert "phalanx train" in reference
    shown = [
        path for path in entries() if inspect.isroutine(named(path)) or inspect.isclass(named(path))
    ]
    assert [path for path in shown if f'id="{path}"' not in reference] == []
