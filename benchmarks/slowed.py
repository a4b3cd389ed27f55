"""What each contestant of ``make bench-balance`` runs: two replicas, one of them perhaps slowed.

Slowed means that the replica waits in every forward pass, as long for a row as its work on it takes
times the slowdown less one. The wait takes no core from the other replica.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import phalanx
from benchmarks.contestants import Batch, build, loss_of, plain_step, sgd
from benchmarks.turns import Step, serve
from phalanx.plan import workload_sizes

NUM_REPLICAS = 2
SLOW = 1  # which of them


@dataclass(frozen=True, kw_only=True)
class BalanceJob:
    """One contestant.

    Args:
        container: ``"trainer"`` or ``"dataparallel"``.
        workloads: As the container takes them.
        slow_s: Seconds that the slow replica waits for each of its rows.
        account: Where it writes at its end what it has done.
    """

    container: str
    workloads: str | Sequence[float] | None
    model: str
    slow_s: float
    account: str

    def run(self) -> None:
        """Be the contestant."""
        serve(open_job(self))


class Slowdown:
    """A forward pre-hook that makes one replica wait ``seconds_per_row`` for each of its rows."""

    def __init__(self, seconds_per_row: float) -> None:
        self._seconds_per_row = seconds_per_row
        self._never = threading.Event()

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:  # Any: a module's inputs
        if threading.current_thread().name.endswith(f"-{SLOW}"):
            self._never.wait(self._seconds_per_row * len(args[0]))


@contextmanager
def open_job(job: BalanceJob) -> Iterator[Step]:
    """Set up a contestant and yield its step; write its account at the end."""
    module, batch = build(job.model)
    if job.slow_s:
        module.register_forward_pre_hook(Slowdown(job.slow_s))
    shares: list[list[int]] = []
    opened = _trainer if job.container == "trainer" else _data_parallel
    with opened(job, module, batch) as (step, seconds_per_row):
        yield lambda: shares.append(list(step()))
        account = {"shares": shares, "seconds_per_row": seconds_per_row}
    Path(job.account).write_text(json.dumps(account), encoding="utf-8")


# How a step is made, and the rows of each replica in it; and what a row has taken each, by step.
Opened = tuple[Callable[[], Sequence[int]], list[list[float]]]


@contextmanager
def _trainer(job: BalanceJob, module: nn.Module, batch: Batch) -> Iterator[Opened]:
    with phalanx.Trainer(
        module,
        loss_of,
        sgd,
        microbatches=None,
        replicas=NUM_REPLICAS,
        workloads=job.workloads,
    ) as trainer:
        costs: list[list[float]] = []

        def step() -> Sequence[int]:
            done = trainer.step(batch)
            pairs = zip(done.work_s, done.shares, strict=True)
            costs.append([seconds / rows for seconds, rows in pairs if rows])
            return done.shares

        yield step, costs


@contextmanager
def _data_parallel(job: BalanceJob, module: nn.Module, batch: Batch) -> Iterator[Opened]:
    devices = ["cpu"] * NUM_REPLICAS
    with phalanx.DataParallel(module, devices, workloads=job.workloads) as parallel:
        plain = plain_step(parallel, batch, sgd(module.parameters()))

        def step() -> Sequence[int]:
            sizes = workload_sizes(len(batch[1]), parallel.workloads)
            plain()
            return sizes

        yield step, []


def read_account(path: Path) -> Mapping[str, Any]:  # Any: JSON
    """Return what a contestant has written beside its times; nothing if it did not end well.

    ``shares`` are rows of each replica, step by step, from the very first on; ``seconds_per_row``
    what a row has taken each replica of a `Trainer`.
    """
    if not path.exists():
        return {"shares": [], "seconds_per_row": []}
    account: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return account
