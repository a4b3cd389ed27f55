"""Measure the package as a house: its size, its names, and how far one call walks through it.

`make house` prints the figures beside the aims they are steered by; with ``--json`` as data.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import phalanx
from phalanx import tables
from tests.meta.source import ROOT, SOURCE, Module, read_house

WARM_UP_STEPS = 3
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # calls to Python 3.11 only


@dataclass
class Walk:
    """What one call passes of the package: files, functions, calls, and calls from room to room."""

    files: set[str] = field(default_factory=set)
    functions: set[Any] = field(default_factory=set)
    calls: int = 0
    changes_of_room: int = 0

    def enter(self, frame: FrameType) -> None:
        """Count a call of a function of the package; others are passed through."""
        path = path_in_package(frame)
        if path is None or frame.f_code.co_name in COMPREHENSIONS:
            return
        self.files.add(path)
        self.functions.add(frame.f_code)
        self.calls += 1
        caller = frame.f_back
        while caller is not None and path_in_package(caller) is None:
            caller = caller.f_back
        if caller is not None and room_of(path_in_package(caller) or "") != room_of(path):
            self.changes_of_room += 1

    def figures(self) -> dict[str, int]:
        return {
            "files": len(self.files),
            "functions": len(self.functions),
            "calls": self.calls,
            "changes of room": self.changes_of_room,
        }


def path_in_package(frame: FrameType) -> str | None:
    """Return the path of a frame's file under src/phalanx, or None."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


@contextmanager
def profiled() -> Iterator[Callable[[Callable[[], object]], Walk]]:
    """Give a function that walks one call, through all threads that are started in the block."""
    walk: Walk | None = None

    def profile(frame: FrameType, event: str, _: object) -> None:
        if walk is not None and event == "call":
            walk.enter(frame)

    def measure(call: Callable[[], object]) -> Walk:
        nonlocal walk
        walk = found = Walk()
        call()
        walk = None
        return found

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield measure
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def open_trainer(executor: str = "threads") -> phalanx.Trainer:
    """Return a trainer of two replicas for a net of two layers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 10))
    return phalanx.Trainer(
        net,
        F.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        executor=executor,
        replicas=2,
        microbatches=4,
    )


def walk_step(executor: str) -> Walk:
    """Walk one steady `Trainer.step`; of worker processes only the parent is seen."""
    batch = torch.randn(23, 20), torch.randint(10, (23,))
    with profiled() as measure, open_trainer(executor) as trainer:
        for _ in range(WARM_UP_STEPS):
            trainer.step(batch)
        return measure(lambda: trainer.step(batch))


def walk_add() -> Walk:
    """Walk one steady `Table.add` of a few rows."""
    rows, delta = torch.tensor([1, 5]), torch.ones(2, 8)
    with profiled() as measure, tables.join() as group:
        table = group.matrix(9, 8, name="house")
        for _ in range(WARM_UP_STEPS):
            table.add(delta, rows)
        return measure(lambda: table.add(delta, rows))


def doubled(names: Iterable[str]) -> dict[str, int]:
    """Return the names that stand there more than once, the most frequent first."""
    return {name: count for name, count in Counter(names).most_common() if count > 1}


def class_names(house: list[Module]) -> Iterator[str]:
    """Yield the name of each class, but for `compat`, whose names are those of earlier systems."""
    for module in house:
        if module.room == "compat":
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                yield node.name


def file_names(house: list[Module]) -> Iterator[str]:
    """Yield the name of each file once for each room that has it; every folder has an __init__."""
    rooms = {(module.room, module.path.split("/")[-1]) for module in house}
    for room, name in sorted(rooms):
        if room == "compat":  # as above
            continue
        if name != "__init__.py":
            yield name


def count_code(module: Module) -> int:
    """Count the lines that are not blank and hold neither a comment alone nor a docstring."""
    prose = {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        number not in prose and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(module.lines, start=1)
    )


def size_by_room(house: list[Module]) -> dict[str, dict[str, int]]:
    """Return Python files, lines and lines of code of each room, the largest first."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    code: Counter[str] = Counter()
    for module in house:
        files[module.room] += 1
        lines[module.room] += len(module.lines)
        code[module.room] += count_code(module)
    return {
        room: {"files": files[room], "lines": count, "code": code[room]}
        for room, count in lines.most_common()
    }


def count_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def pages() -> list[Path]:
    """Return the pages of the site: all of docs/ but those for developers."""
    docs = ROOT / "docs"
    for_developers = {"architecture.md", "original_faults.md", "promises.md"}
    found = [path for path in docs.glob("*.md") if path.name not in for_developers]
    return [*found, *(docs / "reference").glob("*.md")]


@dataclass(frozen=True)
class Figures:
    """All that is measured of the package."""

    rooms: dict[str, dict[str, int]]
    c: dict[str, int]
    walks: dict[str, dict[str, int]]
    class_names_twice: dict[str, int]
    file_names_in_several_rooms: dict[str, int]
    other_lines: dict[str, int]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield what is counted, what it is, and what it shall be."""
        files, lines, code = (
            sum(room[key] for room in self.rooms.values()) for key in ("files", "lines", "code")
        )
        yield "Python in src/phalanx", f"{lines:,} lines, {files} files", "30,000 lines, 190 files"
        yield "of these without comments and blanks", f"{code:,} lines", ""
        yield "C", f"{self.c['lines']} lines, {self.c['files']} files", "1,200 lines"
        aims = ("20 / 70", "20 / 75", "4 / 10")
        for (name, walk), aim in zip(self.walks.items(), aims, strict=True):
            yield name, " / ".join(map(str, walk.values())), aim
        yield "class names used twice", str(len(self.class_names_twice)), "0"
        yield "file names in several rooms", str(len(self.file_names_in_several_rooms)), "0"
        aims = ("36,000", "2,200", "3,500")
        for (name, count), aim in zip(self.other_lines.items(), aims, strict=True):
            yield f"lines of {name}", f"{count:,}", aim


def measure_house() -> Figures:
    """Measure the package as it lies here."""
    house = read_house()
    compiled = sorted(SOURCE.rglob("*.[ch]"))
    return Figures(
        rooms=size_by_room(house),
        c={"files": len(compiled), "lines": count_lines(compiled)},
        walks={
            "Trainer.step, threads": walk_step("threads").figures(),
            "Trainer.step, parent of processes": walk_step("processes").figures(),
            "Table.add": walk_add().figures(),
        },
        class_names_twice=doubled(class_names(house)),
        file_names_in_several_rooms=doubled(file_names(house)),
        other_lines={
            "tests": count_lines((ROOT / "tests").rglob("*.py")),
            "benchmarks": count_lines((ROOT / "benchmarks").rglob("*.py")),
            "docs on the site": count_lines(pages()),
        },
    )


def show(figures: Figures) -> None:
    """Print the figures beside the aims, then the rooms, then the names that stand twice."""
    console = Console()
    aims = Table(
        "",
        "today",
        "aim",
        caption="Walks: files / functions / calls / changes of room.",
    )
    for row in figures.rows():
        aims.add_row(*row)
    rooms = Table("room", "files", "lines", "code")
    for room, size in figures.rooms.items():
        rooms.add_row(room, str(size["files"]), f"{size['lines']:,}", f"{size['code']:,}")
    console.print(aims, rooms)
    for title, names in (
        ("Classes", figures.class_names_twice),
        ("Files", figures.file_names_in_several_rooms),
    ):
        console.print(f"{title}:", ", ".join(f"{name} {count}" for name, count in names.items()))


if __name__ == "__main__":
    found = measure_house()
    if "--json" in sys.argv[1:]:
        print(json.dumps(asdict(found), indent=1))
    else:
        show(found)
