"""Which executor a trainer opens, and where its memory lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from phalanx.execution import (
    Executor,
    FailureLog,
    ProcessExecutor,
    ThreadExecutor,
    WorkerFailure,
    is_worth_sending,
    open_ranks,
    write_once,
)
from phalanx.memory import Allocate, SharedMemoryPool, zeros
from phalanx.train.formation import Formation
from phalanx.train.work import Work

__all__ = ["EXECUTORS", "ExecutorMaker", "writer_of"]

EXECUTORS = ("threads", "processes", "inline", "ranks")


def writer_of(executor: str) -> Callable[[Callable[[], None]], None]:
    """Return what calls a function that writes files: once, however many processes there are."""
    return write_once if executor == "ranks" else _call


def _call(write: Callable[[], None]) -> None:
    write()


class ExecutorMaker:
    """Open executors of one kind.

    Args:
        kind: One of `EXECUTORS`.
        work: What is computed; worker processes get it with the module.
        timed: Measure replicas on devices that work behind their thread's back.
        timeout_s: How long a microbatch may take before its worker process counts as hung.
        memory_dir: A folder for what worker processes share; None for anonymous memory.
        failures: Takes note of worker processes that were lost.
    """

    def __init__(
        self,
        kind: str,
        work: Work,
        *,
        timed: bool,
        timeout_s: float,
        memory_dir: Path | None,
        failures: FailureLog,
    ) -> None:
        self._work = work
        self._timed = timed
        self._timeout_s = timeout_s
        self._on_failure: Callable[[WorkerFailure], None] = failures.add
        self._kind = kind
        self._shelf = SharedMemoryPool(memory_dir) if kind == "processes" else None

    @property
    def allocate(self) -> Allocate:
        """Makes memory where the executor wants parameters and gradients to lie."""
        return zeros if self._shelf is None else self._shelf.allocate

    def __call__(
        self, module: nn.Module, formation: Formation, workloads: Sequence[float] | None
    ) -> Executor:
        """Open an executor over ``module``."""
        if self._shelf is None:
            local = ThreadExecutor(
                module,
                formation.devices,
                workloads=workloads,
                intra_op=formation.intra_op,
                timed=self._timed,
                inline=self._kind == "inline",
            )
            return local if self._kind != "ranks" else open_ranks(local, module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        num_elements = sum(parameter.numel() for parameter in trained)
        return ProcessExecutor(
            module,
            len(formation.devices),
            shelf=self._shelf,
            shared=[self._work],
            workloads=workloads,
            intra_op=formation.intra_op,
            steps=is_worth_sending(num_elements, len(formation.devices)),
            timeout_s=self._timeout_s,
            on_failure=self._on_failure,
        )
