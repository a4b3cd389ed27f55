"""Each fault of an earlier system that docs/original_faults.md lists has a test that exists."""

from __future__ import annotations

import ast
import re

from tests.meta.source import ROOT


def names_of_tests() -> set[str]:
    """Return ``test``, ``path::test`` and ``path::Class::test`` of all tests."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        bodies = [("", tree.body), *((f"{node.name}::", node.body) for node in classes)]
        for before, body in bodies:
            found = [node.name for node in body if isinstance(node, ast.FunctionDef)]
            names |= {*found, *(f"{path.relative_to(ROOT)}::{before}{name}" for name in found)}
    return names


def test_every_fault_has_a_test_that_exists() -> None:
    page = (ROOT / "docs/original_faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| `?([\w/.:]+)`? \|$", page, re.MULTILINE)
    named = [name for name in rows if "test_" in name]
    assert len(named) == len(re.findall(r"^\| (?!thread|what|-)", page, re.MULTILINE)) > 80
    assert sorted(set(named) - names_of_tests()) == []
