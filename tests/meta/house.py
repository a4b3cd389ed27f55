"""Measure the package: its size, its names, and how many files and functions one call passes.

`make house` prints the figures beside the aims they are steered by.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import tables
from tests.meta import bits
from tests.meta.source import ROOT, SOURCE, Module, read_house

WARM_UP_STEPS = 3
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # calls to Python 3.11 only


@dataclass
class Walk:
    """The files and functions of the package that one call passes."""

    files: set[str] = field(default_factory=set)
    functions: set[Any] = field(default_factory=set)

    def enter(self, frame: FrameType) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and frame.f_code.co_name not in COMPREHENSIONS:
            self.files.add(path.relative_to(SOURCE).as_posix())
            self.functions.add(frame.f_code)

    def __str__(self) -> str:
        return f"{len(self.files)} / {len(self.functions)}"


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


def walk_step(executor: str) -> Walk:
    """Walk one steady `Trainer.step`; of worker processes only the parent is seen."""
    net, (batch, *_) = bits.open_model("mlp")
    options: Any = {"executor": executor, "replicas": 2, "microbatches": 4}
    with profiled() as measure, phalanx.Trainer(net, F.cross_entropy, sgd, **options) as trainer:
        for _ in range(WARM_UP_STEPS):
            trainer.step(batch)
        return measure(lambda: trainer.step(batch))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def walk_add() -> Walk:
    """Walk one steady `Table.add` of a few rows."""
    rows, delta = torch.tensor([1, 5]), torch.ones(2, 8)
    with profiled() as measure, tables.join() as group:
        table = group.matrix(9, 8, name="house")
        for _ in range(WARM_UP_STEPS):
            table.add(delta, rows)
        return measure(lambda: table.add(delta, rows))


def doubled(names: Iterable[str]) -> dict[str, int]:
    """Return the names that stand there more than once."""
    return {name: count for name, count in Counter(names).items() if count > 1}


def class_names(house: list[Module]) -> Iterator[str]:
    """Yield the name of each class, but for `compat`, whose names are those of earlier systems."""
    for module in house:
        if module.room == "compat":
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                yield node.name


def file_names(house: list[Module]) -> Iterator[str]:
    """Yield the name of each file once for each package that has it, but for `compat`."""
    rooms = {(module.room, module.path.split("/")[-1]) for module in house}
    for room, name in sorted(rooms):
        if room != "compat" and name != "__init__.py":
            yield name


def count_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def pages() -> list[Path]:
    """Return the pages of the site: all of docs/ but those for developers."""
    docs = ROOT / "docs"
    for_developers = {"architecture.md", "original_faults.md", "promises.md"}
    found = [path for path in docs.glob("*.md") if path.name not in for_developers]
    return [*found, *(docs / "reference").glob("*.md")]


def show() -> None:
    """Print the figures beside the aims, then the packages, the largest first."""
    house = read_house()
    lines = sum(len(module.lines) for module in house)
    tests, benchmarks = ((ROOT / name).rglob("*.py") for name in ("tests", "benchmarks"))
    figures = Table("", "today", "aim", caption="Walks: files / functions.")
    for row in (
        ("lines of src/phalanx", f"{lines:,}", "30,000"),
        ("files of src/phalanx", f"{len(house)}", "190"),
        ("lines of C", f"{count_lines(SOURCE.rglob('*.[ch]')):,}", "1,200"),
        ("Trainer.step, threads", str(walk_step("threads")), "20 / 70"),
        ("Trainer.step, parent of processes", str(walk_step("processes")), "20 / 75"),
        ("Table.add", str(walk_add()), "4 / 10"),
        ("lines of tests", f"{count_lines(tests):,}", "36,000"),
        ("lines of benchmarks", f"{count_lines(benchmarks):,}", "2,200"),
        ("lines of docs on the site", f"{count_lines(pages()):,}", "3,500"),
    ):
        figures.add_row(*row)
    sizes: dict[str, list[int]] = {}
    for module in house:
        sizes.setdefault(module.room, []).append(len(module.lines))
    packages = Table("package", "files", "lines")
    for room, each in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        packages.add_row(room, f"{len(each)}", f"{sum(each):,}")
    Console().print(figures, packages)


if __name__ == "__main__":
    show()
