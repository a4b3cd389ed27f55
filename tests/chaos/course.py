"""A training with worker processes, and beside it the same training that nothing happens to.

Both do one update after another, and everything is compared after each: so it is known which fault
changed something, and one executor of workers serves many faults.
"""

from __future__ import annotations

import math
import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import phalanx
from phalanx.execution import ProcessExecutor
from phalanx.execution.worker_process import WorkerProcess
from phalanx.ipc import fail_points
from tests.chaos.saboteur import REASONS, Order, Orders, Saboteur

DEADLINE_S = 90.0  # for anything; far more than all of it takes
MICROBATCHES = 7


class _Passed(torch.autograd.Function):
    """The identity, whose backward pass comes by a point."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        fail_points.fail_point("inside backward")
        return grad


WIDTH = 160  # so that a gradient is large enough to be made in its slot


class Net(nn.Module):
    """Batch norm, dropout, a counter, a parameter used twice, and two points in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        # More than the kernel keeps of a message that nobody reads.
        self.register_buffer("table", torch.zeros(1 << 17), persistent=False)

    def forward(self, x_NLI: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.norm(self.first(x_NLI).transpose(1, 2))  # L > 1: one row is enough
        hidden = self.drop(torch.relu(hidden).mean(2))
        fail_points.fail_point("inside forward")
        hidden = _Passed.apply(torch.relu(self.middle(self.middle(hidden))))
        scores: Tensor = self.last(hidden)
        return scores


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": parameters[:3], "lr": 3e-3, "weight_decay": 0.1},
            {"params": parameters[3:], "lr": 1e-3},
        ]
    )


def rate(step: int) -> float:
    return 0.6 + 0.4 * math.cos(step / 7)


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, rate)


def batches() -> list[tuple[Tensor, Tensor]]:
    """5 batches of 15 rows and one of 6, of which one microbatch is empty."""
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 2, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw))
        for size in (15, 15, 15, 15, 15, 6)
    ]


class Watched:
    """A trainer and what it has told."""

    def __init__(self, executor: str, replicas: int, timeout_s: float = DEADLINE_S) -> None:
        torch.manual_seed(3)
        self.replicas = replicas
        self.losses: list[float] = []
        self.lost: list[phalanx.WorkerLost] = []
        self.trainer = phalanx.Trainer(
            Net(),
            nn.functional.cross_entropy,
            adamw,
            executor=phalanx.Processes(timeout_s=timeout_s, max_failures=None)
            if executor == "processes"
            else executor,
            replicas=replicas,
            microbatches=MICROBATCHES,
            seed=11,
            clip_norm=0.5,
            scheduler=schedule,
            scheduler_interval="step",
            callbacks=[self._note],
        )
        self._data = batches()

    def _note(self, event: object) -> None:
        if isinstance(event, phalanx.StepDone):
            self.losses.append(event.loss)
        elif isinstance(event, phalanx.WorkerLost):
            self.lost.append(event)

    def step(self) -> None:
        self.trainer.fit(self._data, steps=1)

    def everything(self) -> dict[str, object]:
        """Return all that must be the same, by name."""
        trainer = self.trainer
        state = trainer.optimizer.state_dict()["state"]
        assert trainer.scheduler is not None
        return {
            **{f"model.{name}": value for name, value in trainer.module.state_dict().items()},
            **{f"optimizer.{i}.{k}": v for i, each in state.items() for k, v in each.items()},
            "rates": [group["lr"] for group in trainer.optimizer.param_groups],
            "scheduler": trainer.scheduler.last_epoch,
            "position": trainer._position,
            "losses": self.losses,
        }


def differing(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """Return the names of what is not the same, bit for bit."""
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not _same(ours[name], theirs[name])
    )


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    return ours == theirs


class Course:
    """The two trainings; use it as a context manager.

    Args:
        folder: For orders; empty.
        replicas: Number of workers.
        timeout_s: After which a worker counts as hung.
    """

    def __init__(self, folder: Path, replicas: int, timeout_s: float = DEADLINE_S) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.orders = Orders(folder)
        self.timeout_s = timeout_s
        self.disturbed = Watched("processes", replicas, timeout_s)
        self.undisturbed = Watched("inline", 1)

    def __enter__(self) -> Course:
        self._planted_before = fail_points.fault  # there may be a course around this one
        fail_points.inject(Saboteur(str(self.folder)))
        return self

    def __exit__(self, *exc: object) -> None:
        fail_points.inject(self._planted_before)
        self.disturbed.trainer.close()
        self.undisturbed.trainer.close()

    @property
    def executor(self) -> ProcessExecutor:
        engine = self.disturbed.trainer._engine
        assert engine is not None
        assert isinstance(engine.executor, ProcessExecutor)
        return engine.executor

    def worker(self, index: int) -> WorkerProcess:
        worker = self.executor._workers[index]
        assert worker is not None
        return worker

    def are_all_there(self) -> bool:
        return None not in self.executor._workers

    # -- updates -----------------------------------------------------

    def warm_up(self) -> None:
        """Do the first update, which starts the workers."""
        self.step()
        self.compare()

    def step(self) -> None:
        self.disturbed.step()
        self.undisturbed.step()

    def compare(self) -> None:
        """Fail unless everything is the same in both."""
        names = differing(self.disturbed.everything(), self.undisturbed.everything())
        assert not names, f"differ after step {self.undisturbed.trainer.steps}: {', '.join(names)}"

    def start_over(self, folder: Path) -> None:
        """Give the disturbed one the other's state, after something went wrong."""
        self.orders.withdraw()
        self.undisturbed.trainer.save(folder)
        self.disturbed.trainer.resume(folder)
        self.disturbed.losses[:] = self.undisturbed.losses
        self.disturbed.lost.clear()
        self.compare()

    # -- faults ------------------------------------------------------

    def await_end(self, index: int) -> None:
        assert wait([self.worker(index)._sentinel], DEADLINE_S)

    def suffer(
        self, orders: dict[int, Order], *, compared: bool = True
    ) -> list[phalanx.WorkerLost]:
        """Do updates until all orders, by worker, are carried out; return the losses, by worker.

        Which microbatches a worker gets is a matter of time, so it may take some updates until it
        comes by a point of theirs.
        """
        for index, order in orders.items():
            self.orders.give(index, order)
        self.disturbed.lost.clear()
        left = set(orders)
        deadline_s = time.monotonic() + DEADLINE_S
        while left:
            assert time.monotonic() < deadline_s, f"not carried out: {[orders[i] for i in left]}"
            self.step()
            left -= {index for index in left if self.orders.fired_s(index) is not None}
            if compared:
                self.compare()
        while not all(self._was_told(index, REASONS[o.deed]) for index, o in orders.items()):
            assert time.monotonic() < deadline_s, f"not all told of: {self.disturbed.lost}"
            self.step()  # a worker that crashes may take longer to be gone than this update
        found = [self.told_of(index, REASONS[orders[index].deed]) for index in sorted(orders)]
        # With little patience, and on a busy machine, others may have been late as well.
        assert self.timeout_s < DEADLINE_S or len(self.disturbed.lost) == len(found)
        return found

    def told_of(self, index: int, reason: str) -> phalanx.WorkerLost:
        """Return what was told of a worker that was lost for that reason."""
        found = self._was_told(index, reason)
        told = self.disturbed.lost
        assert found, f"worker {index} should have been lost, {reason!r}, but: {told}"
        return found[0]

    def _was_told(self, index: int, reason: str) -> list[phalanx.WorkerLost]:
        told = self.disturbed.lost
        return [each for each in told if each.worker == index and reason in each.reason]

    def kill(self, index: int) -> None:
        """Kill a worker from outside, and wait until it is gone."""
        os.kill(self.worker(index).pid, signal.SIGKILL)
        self.await_end(index)
