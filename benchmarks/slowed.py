"""What each contestant of ``make bench-balance`` runs: two replicas, one of them perhaps slowed.

Slowed means that the replica waits in every forward pass, as long for a row as its work on it takes
times the slowdown less one. The wait takes no core from the other replica.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import phalanx
from benchmarks.contestants import build, loss_of, sgd
from benchmarks.turns import Step, serve

NUM_REPLICAS = 2
SLOW = 1  # which of them


@dataclass(frozen=True, kw_only=True)
class BalanceJob:
    """One contestant.

    Args:
        workloads: As `Trainer` takes them.
        slow_s: Seconds that the slow replica waits for each of its rows.
        account: Where it writes at its end what it has done.
    """

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
    with phalanx.Trainer(
        module,
        loss_of,
        sgd,
        microbatches=None,
        replicas=NUM_REPLICAS,
        workloads=job.workloads,
    ) as trainer:
        costs: list[list[float]] = []

        def step() -> None:
            done = trainer.step(batch)
            shares.append(list(done.shares))
            pairs = zip(done.work_s, done.shares, strict=True)
            costs.append([seconds / rows for seconds, rows in pairs if rows])

        yield step
        account = {"shares": shares, "seconds_per_row": costs}
    Path(job.account).write_text(json.dumps(account), encoding="utf-8")


def read_account(path: Path) -> Mapping[str, Any]:  # Any: JSON
    """Return what a contestant has written beside its times; nothing if it did not end well.

    ``shares`` are rows of each replica, step by step, from the very first on; ``seconds_per_row``
    what a row has taken each replica of a `Trainer`.
    """
    if not path.exists():
        return {"shares": [], "seconds_per_row": []}
    account: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return account
