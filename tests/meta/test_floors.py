"""A room imports only from floors below it, through the other's front door, at the file's top."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.meta.source import (
    FLOOR_BY_ROOM,
    PACKAGE,
    Import,
    Module,
    is_stdlib,
    is_within,
)

SLOW = {
    "phalanx.metrics.group_metrics",  # needs torchmetrics, which takes half as long as torch
    "phalanx.callbacks.live_display",  # needs rich, which no worker process does
    # Need torch's launcher.
    *("phalanx.distributed.launcher", "phalanx.distributed.launch"),
    *("phalanx.distributed.rank_start", "phalanx.cluster.ray_launcher"),
    # Need torch, which the command line does without until a command runs.
    *("phalanx.cli.losses", "phalanx.cli.session", "phalanx.codecs", "phalanx.distributed"),
    *("phalanx.cli.diagnosis", "phalanx.cli.machine"),
    *("phalanx.cli.reporting.page", "phalanx.cli.reporting.runs"),
    # Need pyzmq, an extra.
    *("phalanx.cluster", "phalanx.tables.host_rendezvous", "phalanx.tables.spread_run"),
}


def room_of(item: Import) -> str | None:
    """Return the room that an import reaches; ``__init__`` is the package's own front door."""
    if not is_within(item.module, PACKAGE):
        return None
    parts = item.dotted.split(".")[1:]
    if parts and parts[0] in FLOOR_BY_ROOM:
        return parts[0]
    return "__init__"


def floor_offences(module: Module) -> list[str]:
    """List imports of rooms that are not strictly below the module's own."""
    if module.room not in FLOOR_BY_ROOM:
        return [
            f"{module.path}: the room `{module.room}` stands on no floor; give it one in FLOORS"
        ]
    offences = []
    for item in module.imports:
        room = room_of(item)
        if room is None or room == module.room:
            continue
        if FLOOR_BY_ROOM[room] >= FLOOR_BY_ROOM[module.room]:
            offences.append(
                f"{module.path}:{item.line}: `{item.dotted}` is not below `{module.room}`"
            )
    return offences


def privacy_offences(module: Module) -> list[str]:
    """List reaches into another room past its ``__init__``, or for its underscore names."""
    offences = []
    room_by_name: dict[str, str] = {}
    for item in module.imports:
        room = room_of(item)
        if room is None or room == module.room:
            continue
        inner = item.dotted.split(".")[2:]
        where = f"{module.path}:{item.line}"
        if any(part.startswith("_") and not part.startswith("__") for part in inner):
            offences.append(f"{where}: `{item.dotted}` is private to `{room}`")
        elif item.module.count(".") > 1 and module.room != "__main__":  # a command has no door
            offences.append(f"{where}: import `{item.dotted}` from `{PACKAGE}.{room}` itself")
        bound = item.bound_as or item.name
        if bound is not None:
            room_by_name[bound] = room
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in room_by_name
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            where = f"{module.path}:{node.lineno}"
            room = room_by_name[node.value.id]
            offences.append(f"{where}: `{node.value.id}.{node.attr}` is private to `{room}`")
    return offences


def has_reason(module: Module, item: Import) -> bool:
    """Say whether a comment with words stands on the import's line or above its group."""
    import_lines = {line for other in module.imports for line in (other.line, other.last_line)}
    first = item.line
    while first - 1 in import_lines:
        first -= 1
    above = module.lines[first - 2].strip() if first > 1 else ""
    here = module.lines[item.last_line - 1].partition("#")[2].strip()
    comments = [above.removeprefix("#").strip() if above.startswith("#") else "", here]
    return any(comment and not comment.startswith(("noqa", "type:")) for comment in comments)


def late_import_offences(module: Module) -> list[str]:
    """List imports inside functions, except of slow or third-party ones with the reason beside."""
    offences = []
    for item in module.imports:
        if not item.in_function:
            continue
        where = f"{module.path}:{item.line}: `{item.dotted}` is imported inside a function"
        if is_within(item.module, PACKAGE) and not {item.module, item.dotted} & SLOW:
            offences.append(f"{where}, though it is ours")
        elif is_stdlib(item.module):
            offences.append(f"{where}, though it is always there")
        elif not has_reason(module, item):
            offences.append(f"{where} without a comment that says why")
    for use in module.uses:
        if use.call is not None and use.dotted in (
            "importlib.import_module",
            "builtins.__import__",
        ):
            names = [a.value for a in use.call.args if isinstance(a, ast.Constant)]
            if any(isinstance(name, str) and is_within(name, PACKAGE) for name in names):
                offences.append(f"{module.path}:{use.line}: imports our own module by a string")
    return offences


def cycles(modules: list[Module]) -> Iterator[list[str]]:
    """Yield groups of modules that import each other when loaded, each group once.

    Importing ``a.b.c`` also loads ``a`` and ``a.b``; that is every submodule's fate and no cycle by
    itself, so only what is asked for by name counts. ``if TYPE_CHECKING`` loads nothing; a slow
    module that is asked for late does.
    """
    known = {module.dotted: module for module in modules}
    edges: dict[str, set[str]] = {}
    for module in modules:
        targets = set()
        for item in module.imports:
            late = item.in_function and not {item.module, item.dotted} & SLOW
            if late or item.for_types_only:
                continue
            target = item.dotted if item.dotted in known else item.module
            if target in known:
                targets.add(target)
        edges[module.dotted] = targets

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for target in edges[stack.pop()] - seen:
                seen.add(target)
                stack.append(target)
        return seen

    reach = {name: reachable(name) for name in edges}
    reported: set[str] = set()
    for name in sorted(edges):
        group = sorted(other for other in reach[name] if name in reach[other])
        if group and name not in reported:
            reported.update(group)
            yield group


@pytest.mark.parametrize("rule", [floor_offences, privacy_offences, late_import_offences])
def test_every_room_keeps_to_its_floor(rule, house):
    offences = [line for module in house for line in rule(module)]
    assert not offences, "\n" + "\n".join(offences)


def test_no_module_imports_itself_by_a_detour(house):
    assert list(cycles(house)) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("plan/a.py", "from phalanx.train import Trainer"),
        ("plan/a.py", "import phalanx.memory"),
        ("plan/a.py", "from phalanx import memory"),
        ("plan/a.py", "from ..memory import flat"),
        ("plan/a.py", "from .. import memory"),
        ("train/a.py", "from phalanx import DataParallel"),
        ("train/a.py", "import phalanx"),
        ("errors.py", "from phalanx.clock import now_s"),
        ("__init__.py", "from phalanx.cli import app"),
        ("tables/a.py", "from phalanx.parallel import DataParallel"),
        ("memory/a.py", "if TYPE_CHECKING:\n    from phalanx.replicas import ThreadExecutor"),
        ("attic/a.py", ""),
    ],
)
def test_an_import_from_above_or_beside_is_caught(path, text):
    assert len(floor_offences(Module(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("plan/a.py", "from phalanx.errors import ConfigError\nfrom phalanx.plan.b import x"),
        ("train/a.py", "from .events import StepDone\nfrom ..replicas import ThreadExecutor"),
        ("__init__.py", "from phalanx.train import Trainer"),
        ("cli/a.py", "import phalanx.cli.train\nimport torch\nfrom phalanx import Trainer"),
    ],
)
def test_an_import_from_below_or_within_passes(path, text):
    assert floor_offences(Module(path, text)) == []
    assert privacy_offences(Module(path, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "from phalanx.memory._pages import allocate",
        "from phalanx.memory import _allocate",
        "from phalanx.memory.flat import FlatParameters",
        "import phalanx.memory.flat",
        "from phalanx import memory\nmemory._allocate()",
        "from phalanx.memory import flat\nflat._segment",
    ],
)
def test_a_reach_past_another_rooms_door_is_caught(text):
    assert len(privacy_offences(Module("train/a.py", text))) == 1


def test_a_rooms_own_private_names_are_its_own():
    text = "from phalanx.train._order import _key\nfrom . import _order\n_order._key"
    assert privacy_offences(Module("train/a.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from phalanx.plan import Layout",
        "def f():\n    from . import b",
        "def f():\n    from phalanx.metrics.group_metrics import accumulator_of",
        "def f():\n    import json  # slow",
        "def f():\n    import matplotlib",
        "def f():\n    import matplotlib  # noqa: PLC0415",
        "def f():\n    # reason\n    pass\n    import matplotlib",
        "class A:\n    async def f(self):\n        if self:\n            import ray",
        "from importlib import import_module\nimport_module('phalanx.train')",
    ],
)
def test_a_late_import_without_right_or_reason_is_caught(text):
    assert len(late_import_offences(Module("train/a.py", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import matplotlib  # slow: 0.4 s",
        "def f():\n    # Optional: in the extra `cluster` only.\n    import ray",
        "def f():\n    # Optional: in the extra `cluster`.\n    import ray\n    import zmq",
        "try:\n    import ray\nexcept ImportError:\n    ray = None",
        "import importlib\ndef f(name):\n    return importlib.import_module(name)",
        "def f():\n    from phalanx.metrics.group_metrics import accumulator_of  # slow",
    ],
)
def test_a_late_import_with_its_reason_passes(text):
    assert late_import_offences(Module("train/a.py", text)) == []


def test_a_cycle_is_caught():
    a = Module("plan/a.py", "from phalanx.plan import b")
    b = Module("plan/b.py", "from phalanx.plan.c import f")
    c = Module("plan/c.py", "import phalanx.plan.a")
    assert list(cycles([a, b, c])) == [["phalanx.plan.a", "phalanx.plan.b", "phalanx.plan.c"]]
    typed = Module("plan/c.py", "if TYPE_CHECKING:\n    import phalanx.plan.a")
    assert list(cycles([a, b, typed])) == []


def test_a_file_that_asks_its_own_room_for_a_name_is_a_cycle():
    door = Module("plan/__init__.py", "from phalanx.plan.a import f")
    a = Module("plan/a.py", "from phalanx.plan import g")
    assert list(cycles([door, a])) == [["phalanx.plan", "phalanx.plan.a"]]


def test_a_slow_file_that_is_imported_late_may_be_in_a_cycle_too():
    group = Module("metrics/group_metrics.py", "from phalanx.metrics.loop import fit")
    loop = Module(
        "metrics/loop.py",
        "def f():\n    from phalanx.metrics.group_metrics import a  # slow",
    )
    assert list(cycles([group, loop])) == [
        ["phalanx.metrics.group_metrics", "phalanx.metrics.loop"]
    ]


def kind_offences(module: Module) -> list[str]:
    """List where a user of executors asks which kind of executor, stepper or sums it has."""
    kinds = ("Executor", "Stepper", "Sums")
    return [
        f"{module.path}:{node.lineno}: asks for the kind; give `Executor` a method"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any(
            isinstance(each, ast.Name) and each.id.endswith(kinds)
            for each in ast.walk(node.args[1])
        )
    ]


def test_a_question_for_the_kind_is_caught():
    assert len(kind_offences(Module("train/a.py", "isinstance(own, (int, RankExecutor))"))) == 1


@pytest.mark.parametrize("room", ["train", "parallel", "executor_group"])
def test_nobody_asks_which_executor_it_has(house, room):
    modules = [module for module in house if module.room == room]
    assert modules
    assert [offence for module in modules for offence in kind_offences(module)] == []
