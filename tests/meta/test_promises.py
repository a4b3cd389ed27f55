"""docs/promises.md names tests that exist, and all files of folders whose tests hold promises."""

from __future__ import annotations

import ast
import re

import pytest

from tests.meta.source import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def missing(page: str) -> list[str]:
    """List what a page names that is not there: files, and tests within them."""
    found = []
    for path, test in NAMED.findall(page):
        file = ROOT / path
        if not file.exists():
            found.append(path)
        elif test and test not in {
            node.name
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }:
            found.append(f"{path}::{test}")
    return found


def test_promises_are_held_by_tests_that_exist() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert NAMED.search(page)
    assert missing(page) == []


def test_every_row_of_promises_names_a_test() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    bare = [row for row in rows if not NAMED.search(row)]
    assert all(row.startswith(("| promise", "|---")) for row in bare), bare


@pytest.mark.parametrize("folder", ["chaos", "conformance", "multiprocess"])
def test_every_file_of_these_folders_holds_a_promise(folder: str) -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    named = {path for path, _ in NAMED.findall(page)}
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / folder).glob("test_*"))
    assert sorted(set(files) - named) == []


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("`tests/meta/source.py`", []),
        ("`tests/meta/source.py::read_house`", []),
        ("`tests/meta/gone.py`", ["tests/meta/gone.py"]),
        ("`tests/meta/source.py::gone`", ["tests/meta/source.py::gone"]),
    ],
)
def test_what_is_gone_is_caught(page: str, found: list[str]) -> None:
    assert missing(page) == found
