"""What the formations of ``make bench-memory`` run: a net of which more is held, case by case.

    nothing      a last layer only
    parameters   and behind it many frozen layers
    gradients    and these are trained, by SGD
    optimizer    and by AdamW, which keeps two moments of each parameter

What one case holds more than the one before is parameters, gradients and optimizer state.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.arena import Entrant, Step, serve

__all__ = ["CASES", "FORMATIONS", "MemoryJob", "build", "entrant", "main"]

CASES = ("nothing", "parameters", "gradients", "optimizer")
_ROWS = 24
_CLASSES = 8


@dataclass(frozen=True, kw_only=True)
class MemoryJob:
    """One process of one formation.

    Args:
        width, layers: Of the net: ``layers`` times ``width`` × ``width`` parameters.
    """

    formation: str
    case: str
    workers: int
    width: int
    layers: int
    rank: int = 0
    meeting_point: str = ""


Batch = tuple[Tensor, Tensor]


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


def _optimizer(job: MemoryJob) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if job.case == "optimizer":
            return torch.optim.AdamW(parameters, lr=1e-4)
        return torch.optim.SGD(parameters, lr=1e-4)

    return make


@contextmanager
def _processes(job: MemoryJob) -> Iterator[Step]:
    module, batch = build(job)
    with phalanx.Trainer(
        module, F.mse_loss, _optimizer(job), executor="processes", replicas=job.workers, intra_op=1
    ) as trainer:
        yield lambda: trainer.step(batch)


@contextmanager
def _ddp(job: MemoryJob) -> Iterator[Step]:
    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{job.meeting_point}", rank=job.rank, world_size=job.workers
    )
    try:
        module, batch = build(job)
        inputs, targets = (whole.chunk(job.workers)[job.rank] for whole in batch)
        model = DistributedDataParallel(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = _optimizer(job)(trained)

        def step() -> None:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

        yield step
    finally:
        dist.destroy_process_group()


FORMATIONS: dict[str, Callable[[MemoryJob], AbstractContextManager[Step]]] = {
    "processes": _processes,
    "ddp": _ddp,
}


def entrant(job: MemoryJob) -> Entrant:
    """Return the command lines that run ``job``, with its ranks where it has some."""
    start = f"from {__name__} import main; main()"
    ranks = range(job.workers if job.formation == "ddp" else 1)
    words = [json.dumps({**asdict(job), "rank": rank}) for rank in ranks]
    return Entrant(
        name=job.formation, commands=tuple((sys.executable, "-c", start, word) for word in words)
    )


def main() -> None:
    """Be the process that the command line describes."""
    job = MemoryJob(**json.loads(sys.argv[1]))
    serve(FORMATIONS[job.formation](job))
