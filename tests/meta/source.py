"""The source tree as data: each file of the package with its text and its syntax tree."""

from __future__ import annotations

import ast
import types
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "phalanx"
SOURCE = ROOT / "src" / PACKAGE


@dataclass(frozen=True)
class Module:
    """One Python file of the package; ``path`` is relative to src/phalanx, with forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")


def read_house() -> list[Module]:
    """Read every Python file of the package."""
    return [
        Module(path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    ]


def offered(module: types.ModuleType) -> list[str]:
    """Return the public names that a room has for others."""
    return list(getattr(module, "__all__", importable(module)))


def importable(module: types.ModuleType) -> list[str]:
    """Return all public names of a module that are no modules."""
    return [
        name
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name not in ("annotations", "TYPE_CHECKING")  # those of a room that imports late
    ]
