"""``python -m benchmarks memory``: what all processes of a configuration hold together.

Each configuration runs alone and is measured between two steps, by the kernel's proportional set
size: a page that several processes share counts once. Pages of files, such as torch's code, are
left out, as they depend on who else runs torch. A net of which more is held, case by case:

    nothing      a last layer only
    parameters   and before it many frozen layers
    gradients    and these are trained, by SGD
    optimizer    and by AdamW, which keeps two moments of each parameter
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.contest import Step, Turn, commands_of, serve, time_steps
from benchmarks.models import Batch
from benchmarks.report import OUT, Out, Row, Run, Sheet, read_names
from benchmarks.step import process_group

CASES = ("nothing", "parameters", "gradients", "optimizer")
_WIDTH, _ROWS, _CLASSES = 1024, 24, 8
_STEPS = 4
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class MemoryJob:
    """One process of a configuration.

    Args:
        layers: Of the net, each with 4 MiB of parameters.
    """

    configuration: str
    case: str
    workers: int
    layers: int
    rank: int = 0

    def run(self) -> None:
        """Be the process."""
        serve(self._turns())

    @contextmanager
    def _turns(self) -> Iterator[Turn]:
        with CONFIGURATIONS[self.configuration](self) as step:
            yield lambda number: _held_after(step, number)

    def build(self) -> tuple[nn.Module, Batch]:
        """Return the net of the case, and a batch."""
        layers: list[nn.Module] = []
        for _ in range(self.layers if self.case != "nothing" else 0):
            layers += [nn.Linear(_WIDTH, _WIDTH, bias=False), nn.ReLU()]
        trained = self.case in ("gradients", "optimizer")
        body = nn.Sequential(*layers).requires_grad_(trained)
        module = nn.Sequential(body, nn.Linear(_WIDTH, _CLASSES))
        return module, (torch.randn(_ROWS, _WIDTH), torch.randn(_ROWS, _CLASSES))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the case."""
        kind = torch.optim.AdamW if self.case == "optimizer" else torch.optim.SGD
        return kind(parameters, lr=1e-4)


@contextmanager
def _trainer(job: MemoryJob) -> Iterator[Step]:
    module, batch = job.build()
    with phalanx.Trainer(
        module,
        F.mse_loss,
        job.optimizer,
        microbatches=None,
        replicas=job.workers,
        executor="processes",
    ) as trainer:
        yield lambda: trainer.step(batch)


@contextmanager
def _ddp(job: MemoryJob) -> Iterator[Step]:
    with process_group("gloo", job.rank, job.workers):
        module, (inputs, targets) = job.build()
        inputs, targets = (part.chunk(job.workers)[job.rank] for part in (inputs, targets))
        model = DistributedDataParallel(module)
        optimizer = job.optimizer(p for p in module.parameters() if p.requires_grad)

        def step() -> None:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

        yield step


CONFIGURATIONS: dict[str, Callable[[MemoryJob], AbstractContextManager[Step]]] = {
    "processes": _trainer,
    "ddp": _ddp,
}


def memory(
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "2",
    megabytes: Annotated[
        int, typer.Option(min=4, help="MiB of parameters that the net has, in steps of 4.")
    ] = 128,
    configurations: Annotated[
        str, typer.Option(help=f"Which, separated by commas: {', '.join(CONFIGURATIONS)}.")
    ] = "processes",
    cases: Annotated[
        str, typer.Option(help=f"What the net holds, separated by commas: {', '.join(CASES)}.")
    ] = "optimizer",
    out: Out = OUT,
) -> None:
    """Measure what all processes hold together: by default two worker processes with AdamW."""
    run = Run("memory", out)
    layers = megabytes * _MIB // (4 * _WIDTH * _WIDTH)
    chosen = read_names("configurations", configurations, CONFIGURATIONS)
    held_cases = read_names("cases", cases, CASES)
    rows: list[Row] = []
    for name, count in [(name, int(count)) for name in chosen for count in workers.split(",")]:
        held: list[float | None] = []
        for case in held_cases:
            job = MemoryJob(configuration=name, case=case, workers=count, layers=layers)
            commands = {name: commands_of(job, count if name == "ddp" else 1)}
            what = f"{name}, {count} workers, {case}"
            held.append(run.compete(what, commands, {"MiB": _STEPS}, 1).medians("MiB").get(name))
        rows.append((f"{name}, {count} workers", *held))
    title = f"MiB of all processes, {megabytes} MiB of parameters"
    run.sheets.append(Sheet(title, held_cases, rows))
    run.publish()


def _held_after(step: Step, number: int) -> list[float]:
    """Return the MiB that all processes of this contestant hold after so many steps."""
    time_steps(step, number)
    parent = os.getppid()  # alone with this contestant
    return [sum(map(_held_bytes, _descendants(parent))) / _MIB]


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, those that they have started, and so on."""
    found = [pid]
    for each in found:  # grows on the way
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found[1:]


def _held_bytes(pid: int) -> int:
    """Return a process's own pages, and its part of those that it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = [line.split() for line in lines]
    return sum(int(words[1]) << 10 for words in fields if words[0] in _COUNTED)
