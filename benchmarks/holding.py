"""What the configurations of ``make bench-memory`` run: a net of which more is held, case by case.

    nothing      a last layer only
    parameters   and behind it many frozen layers
    gradients    and these are trained, by SGD
    optimizer    and by AdamW, which keeps two moments of each parameter

What one case holds more than the one before is parameters, gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.contestants import Batch, plain_step, process_group
from benchmarks.processes import Command, command_of
from benchmarks.turns import Step, serve

CASES = ("nothing", "parameters", "gradients", "optimizer")
_ROWS = 24
_CLASSES = 8


@dataclass(frozen=True, kw_only=True)
class MemoryJob:
    """One process of one configuration.

    Args:
        width, layers: Of the net: ``layers`` times ``width`` × ``width`` parameters.
    """

    configuration: str
    case: str
    workers: int
    width: int
    layers: int
    rank: int = 0
    meeting_point: str = ""

    def run(self) -> None:
        """Be the process."""
        serve(CONFIGURATIONS[self.configuration](self))


def build(job: MemoryJob) -> tuple[nn.Module, Batch]:
    """Return the net of a case, and a batch."""
    torch.manual_seed(0)
    stack: list[nn.Module] = []
    if job.case != "nothing":
        for _ in range(job.layers):
            stack += [nn.Linear(job.width, job.width, bias=False), nn.ReLU()]
    trained = job.case in ("gradients", "optimizer")
    body = nn.Sequential(*stack).requires_grad_(trained)
    module = nn.Sequential(body, nn.Linear(job.width, _CLASSES))
    return module, (torch.randn(_ROWS, job.width), torch.randn(_ROWS, _CLASSES))


def _optimizer(job: MemoryJob) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    kind = torch.optim.AdamW if job.case == "optimizer" else torch.optim.SGD
    return lambda parameters: kind(parameters, lr=1e-4)


@contextmanager
def _processes(job: MemoryJob) -> Iterator[Step]:
    module, batch = build(job)
    with phalanx.Trainer(
        module,
        F.mse_loss,
        _optimizer(job),
        microbatches=None,
        replicas=job.workers,
        executor=phalanx.Processes(),
    ) as trainer:
        yield lambda: trainer.step(batch)


@contextmanager
def _ddp(job: MemoryJob) -> Iterator[Step]:
    rank, size = job.rank, job.workers
    with process_group("gloo", rank=rank, size=size, meeting_point=job.meeting_point):
        module, batch = build(job)
        inputs, targets = (whole.chunk(size)[rank] for whole in batch)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        model = DistributedDataParallel(module)
        yield plain_step(model, (inputs, targets), _optimizer(job)(trained), F.mse_loss)


CONFIGURATIONS: dict[str, Callable[[MemoryJob], AbstractContextManager[Step]]] = {
    "processes": _processes,
    "ddp": _ddp,
}


def commands_of(job: MemoryJob) -> list[Command]:
    """Return the command lines that run ``job``, with its ranks where it has some."""
    ranks = range(job.workers if job.configuration == "ddp" else 1)
    return [command_of(replace(job, rank=rank)) for rank in ranks]
