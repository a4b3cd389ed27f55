"""The source tree as data: modules, what they import, and which outside names they use.

Everything here works on text, so that each rule can be tried on a planted offence.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "phalanx"
SOURCE = ROOT / "src" / PACKAGE

# Lowest first. A file or folder directly under src/phalanx is a room; see DESIGN: the house.
FLOORS = (
    ("errors", "types", "clock", "files", "torch_internals"),
    ("plan",),
    ("ipc",),
    ("memory", "codecs"),
    ("distributed", "replicas", "metrics"),
    ("cluster",),
    ("execution", "tables"),
    ("parallel",),
    ("executor_group",),
    ("callbacks",),
    ("train",),
    ("__init__",),  # gathers the public names of the rooms below; what stands above is their user
    ("compat", "cli"),
    ("__main__",),
)
FLOOR_BY_ROOM = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


@dataclass(frozen=True)
class Import:
    """``import module`` (name is None) or ``from module import name``, with absolute names."""

    line: int
    last_line: int
    module: str
    name: str | None
    bound_as: str | None
    in_function: bool
    for_types_only: bool

    @property
    def dotted(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Use:
    """A name from outside the module, in full: ``torch.distributed.init_process_group``."""

    line: int
    dotted: str
    call: ast.Call | None


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

    @property
    def dotted(self) -> str:
        stem = self.path.removesuffix(".py").replace("/", ".").removesuffix("__init__").rstrip(".")
        return f"{PACKAGE}.{stem}".rstrip(".")

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.dotted if self.path.endswith("__init__.py") else self.dotted.rpartition(".")[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self, self.tree, in_function=False, for_types_only=False))

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        return tuple(_uses(self))


def read_house() -> list[Module]:
    """Read every Python file of the package."""
    return [
        Module(path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    ]


def is_stdlib(dotted: str) -> bool:
    return dotted.split(".")[0] in sys.stdlib_module_names


def is_within(dotted: str, prefix: str) -> bool:
    """Say whether ``dotted`` is ``prefix`` or lies in it."""
    return dotted == prefix or dotted.startswith(prefix + ".")


def _imports(
    module: Module, node: ast.AST, *, in_function: bool, for_types_only: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        types_only = for_types_only or (
            isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        )
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(
                    child.lineno,
                    child.end_lineno or child.lineno,
                    alias.name,
                    None,
                    alias.asname,
                    inside,
                    types_only,
                )
        elif isinstance(child, ast.ImportFrom):
            origin = child.module or ""
            if child.level:
                base = module.package.split(".")
                base = base[: len(base) - child.level + 1]
                origin = ".".join([*base, origin]).rstrip(".")
            for alias in child.names:
                yield Import(
                    child.lineno,
                    child.end_lineno or child.lineno,
                    origin,
                    alias.name,
                    alias.asname,
                    inside,
                    types_only,
                )
        else:
            yield from _imports(module, child, in_function=inside, for_types_only=types_only)


def _uses(module: Module) -> Iterator[Use]:
    """Yield imports and every mention of an imported or built-in name, aliases undone.

    Scopes are not followed: a name imported anywhere in the file means that import everywhere.
    """
    origin_by_name: dict[str, str] = {}
    for item in module.imports:
        yield Use(item.line, item.dotted, None)
        if item.name is not None:
            origin_by_name[item.bound_as or item.name] = item.dotted
        elif item.bound_as is not None:
            origin_by_name[item.bound_as] = item.module
        else:
            head = item.module.split(".")[0]
            origin_by_name[head] = head

    def spell(node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            base = spell(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Name):
            if node.id in origin_by_name:
                return origin_by_name[node.id]
            if hasattr(builtins, node.id):
                return f"builtins.{node.id}"
        return None

    call_by_function = {
        id(node.func): node for node in ast.walk(module.tree) if isinstance(node, ast.Call)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            dotted = spell(node)
            if dotted is not None:
                yield Use(node.lineno, dotted, call_by_function.get(id(node)))
