"""``python -m benchmarks memory``: what all processes of a contestant of `step` hold together.

Each runs alone and is measured between two steps, by the kernel's proportional set size: a page
that several processes share counts once. Pages of files, such as torch's code, are left out, as
they depend on who else runs torch. A net of which more is held, case by case:

    nothing      a last layer only
    parameters   and before it many frozen layers
    gradients    and these are trained, by SGD
    optimizer    and by AdamW, which keeps two moments of each parameter
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from benchmarks.contest import Step, Turn, commands_of, time_steps
from benchmarks.models import Batch, Model, sgd
from benchmarks.report import OUT, Names, Out, Row, Run, Sheet, read_names
from benchmarks.step import CONTESTANTS, StepJob

CASES = ("nothing", "parameters", "gradients", "optimizer")
_LAYERS, _WIDTH, _ROWS, _CLASSES = 32, 1024, 24, 8  # 128 MiB of parameters
_STEPS = 4
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


@dataclass(frozen=True, kw_only=True)
class MemoryJob(StepJob):
    """One process of a contestant.

    Args:
        case: What the net holds.
    """

    case: str

    def open_turn(self, stack: ExitStack) -> Turn:
        """Set up, and return what measures after so many steps."""
        step = self.open(stack)
        return lambda number: [_held_after(step, number)]

    @property
    def what(self) -> Model:
        """The model of the case."""
        adamw = partial(torch.optim.AdamW, lr=1e-4)
        return Model(
            build=self._net, rows=_ROWS, optimizer=adamw if self.case == "optimizer" else sgd
        )

    def _net(self, rows: int) -> tuple[nn.Module, Batch]:
        layers: list[nn.Module] = []
        for _ in range(_LAYERS if self.case != "nothing" else 0):
            layers += [nn.Linear(_WIDTH, _WIDTH, bias=False), nn.ReLU()]
        trained = self.case in ("gradients", "optimizer")
        body = nn.Sequential(*layers).requires_grad_(trained)
        module = nn.Sequential(body, nn.Linear(_WIDTH, _CLASSES))
        return module, (torch.randn(rows, _WIDTH), torch.randint(_CLASSES, (rows,)))


def _held_after(step: Step, number: int) -> float:
    """Return the MiB that all processes of this contestant hold after so many steps."""
    time_steps(step, number)
    found = [os.getppid()]  # it has started this contestant alone
    for pid in found:  # grows on the way
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return sum(map(_held_bytes, found[1:])) / 2**20


def _held_bytes(pid: int) -> int:
    """Return a process's own pages, and its part of those that it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = [line.split() for line in lines]
    return sum(int(words[1]) << 10 for words in fields if words[0] in _COUNTED)


def memory(
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2",
    contestants: Names = "processes",
    cases: Annotated[
        str, typer.Option(help=f"What the net holds, separated by commas: {', '.join(CASES)}.")
    ] = "optimizer",
    out: Out = OUT,
) -> None:
    """Measure what all processes hold together: by default two worker processes with AdamW."""
    run = Run("memory", out)
    names = read_names("contestants", contestants, CONTESTANTS)
    held_cases = read_names("cases", cases, CASES)
    rows: list[Row] = []
    for name, count in [(name, int(count)) for name in names for count in workers.split(",")]:
        held = []
        for case in held_cases:
            job = MemoryJob(contestant=name, workers=count, case=case)
            commands = {name: commands_of(job, count if CONTESTANTS[name].ranks else 1)}
            what = f"{name}, {count} workers, {case}"
            held.append(run.compete(what, commands, {"MiB": _STEPS}, 1).medians("MiB").get(name))
        rows.append((CONTESTANTS[name].title.format(workers=count), *held))
    run.sheets.append(Sheet("MiB of all processes, 128 MiB of parameters", held_cases, rows))
    run.publish()
