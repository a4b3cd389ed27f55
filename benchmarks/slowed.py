"""What each contestant of ``make bench-balance`` runs: two replicas, one of them perhaps slowed.

Slowed means that the replica waits in every forward pass, as long for a row as its work on it takes
times the slowdown less one. The wait takes no core from the other replica.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from benchmarks.arena import Entrant, Step, serve
from benchmarks.contestants import Batch, build, loss_of
from phalanx.plan import Decision, workload_sizes

__all__ = ["SLOW", "BalanceAccount", "BalanceJob", "entrant", "main", "open_job", "read_account"]

NUM_REPLICAS = 2
SLOW = 1  # which of them
_LEARNING_RATE = 0.01

# Where a step is made and what it says: the rows of each replica.
Shares = Callable[[], Sequence[int]]


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
    workloads: str | tuple[float, ...] | None
    model: str
    slow_s: float
    account: str


@dataclass(frozen=True, kw_only=True)
class BalanceAccount:
    """What a contestant tells beside its times.

    Args:
        shares: Rows of each replica, step by step, from the very first on.
        decisions: What its workloads were balanced by, if they were.
    """

    shares: list[list[int]]
    decisions: list[Decision]


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
    with opened(job, module, batch) as (step, decisions):
        yield lambda: shares.append(list(step()))
        account = {"shares": shares, "decisions": [asdict(each) for each in decisions()]}
    Path(job.account).write_text(json.dumps(account), encoding="utf-8")


Opened = tuple[Shares, Callable[[], Sequence[Decision]]]


@contextmanager
def _trainer(job: BalanceJob, module: nn.Module, batch: Batch) -> Iterator[Opened]:
    with phalanx.Trainer(
        module, loss_of, _sgd, replicas=NUM_REPLICAS, workloads=job.workloads
    ) as trainer:
        yield lambda: trainer.step(batch).shares, lambda: trainer.decisions


@contextmanager
def _data_parallel(job: BalanceJob, module: nn.Module, batch: Batch) -> Iterator[Opened]:
    inputs, targets = batch
    optimizer = _sgd(module.parameters())
    devices = ["cpu"] * NUM_REPLICAS
    with phalanx.DataParallel(module, devices, workloads=job.workloads) as parallel:

        def step() -> Sequence[int]:
            sizes = workload_sizes(len(targets), parallel.workloads)
            optimizer.zero_grad()
            loss_of(parallel(inputs), targets).backward()
            optimizer.step()
            return sizes

        yield step, lambda: parallel.decisions


def _sgd(parameters: Any) -> torch.optim.Optimizer:  # Any: what torch's optimizers take
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE)


def read_account(path: Path) -> BalanceAccount | None:
    """Return what a contestant has written; None if it did not come to its end."""
    try:
        account = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    decisions = [_as_decision(each) for each in account["decisions"]]
    return BalanceAccount(shares=account["shares"], decisions=decisions)


def _as_decision(stored: dict[str, Any]) -> Decision:  # Any, twice: JSON
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    return Decision(**values)


def entrant(name: str, job: BalanceJob) -> Entrant:
    """Return the command line that runs ``job``."""
    start = f"from {__name__} import main; main()"
    return Entrant(name=name, commands=((sys.executable, "-c", start, json.dumps(asdict(job))),))


def main() -> None:
    """Be the contestant that the command line describes."""
    given = json.loads(sys.argv[1])
    if isinstance(given["workloads"], list):
        given["workloads"] = tuple(given["workloads"])
    serve(open_job(BalanceJob(**given)))
