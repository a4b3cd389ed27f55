"""What each rank does while a step of ranks is measured."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.cli.planning.hollow import Subject, repeated
from phalanx.cli.planning.timing import usual_step_s
from phalanx.train import Trainer

__all__ = ["time_ranks"]


def time_ranks(
    subject: Subject, formations: list[str], sizes: list[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Return the usual step by formation and by size of the model, as this rank sees it."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    timers = {"ranks": _time_trainer, "ddp": _time_ddp}
    found: dict[str, dict[str, float]] = {}
    for name in formations:
        found[name] = {size: timers[name](subject, size, seconds) for size in sizes}
    dist.destroy_process_group()
    return found


def _time_trainer(subject: Subject, size: str, seconds: float) -> float:
    module, loss = subject.build(size)
    batch = repeated(subject.microbatch(), dist.get_world_size())
    with Trainer(module, loss, subject.optimizer(), executor="ranks", intra_op=1) as trainer:
        return usual_step_s(lambda: trainer.step(batch), seconds, agree=_largest)


def _time_ddp(subject: Subject, size: str, seconds: float) -> float:
    module, loss = subject.build(size)
    inputs, targets = subject.microbatch()
    wrapped = DistributedDataParallel(module)
    optimizer = subject.optimizer()(wrapped.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(inputs), targets).backward()
        optimizer.step()

    return usual_step_s(step, seconds, agree=_largest)


def _largest(steps: int) -> int:
    """Return the largest of all ranks' numbers: they make equally many steps."""
    largest = torch.tensor(steps)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)
