"""From `executor=` to an executor: which kind, what that can do, and where its memory lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx.distributed import ElasticExchange, Exchange
from phalanx.errors import UnsupportedError
from phalanx.execution.contract import Executor
from phalanx.execution.executor_options import Processes, Ranks, Threads
from phalanx.execution.failures import FailureLog
from phalanx.execution.processes import ProcessExecutor
from phalanx.execution.ranks import RankExecutor, write_once
from phalanx.execution.threads import ThreadExecutor
from phalanx.plan import check_argument

__all__ = ["ExecutorChoice", "open_executor"]

_EXECUTORS = ("threads", "processes", "inline", "ranks")


@dataclass(frozen=True, kw_only=True)
class ExecutorChoice:
    """The value of ``executor=``, read.

    Attributes:
        kind: "threads", "processes", "inline" or "ranks".
        options: The options of worker processes; the defaults for other kinds, which lose none.
        intra_op: Threads inside operators, per replica; None for the default.
        elastic: The ranks that survive the loss of others; None for any others.
    """

    kind: str
    options: Processes = field(default_factory=Processes)
    intra_op: int | None = None
    elastic: ElasticExchange | None = None

    @staticmethod
    # Any: whatever the user wrote.
    def read(given: Any) -> ExecutorChoice:
        """Read a name or an object with options.

        Raises:
            ConfigError: It is neither.
        """
        known = isinstance(given, (Threads, Processes, Ranks)) or (
            isinstance(given, str) and given in _EXECUTORS
        )
        named = ", ".join(map(repr, _EXECUTORS))
        others = "`Threads(…)`, `Processes(…)` or `Ranks(…)`"
        check_argument(known, "executor", f"be one of {named}, or {others}", given)
        if isinstance(given, str):
            return ExecutorChoice(kind=given)
        if isinstance(given, Threads):
            return ExecutorChoice(kind="threads", intra_op=given.intra_op)
        if isinstance(given, Processes):
            return ExecutorChoice(kind="processes", options=given, intra_op=given.intra_op)
        elastic = ElasticExchange(timeout_s=given.timeout_s, lost_after_s=given.lost_after_s)
        return ExecutorChoice(kind="ranks", intra_op=given.intra_op, elastic=elastic)

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes files, however many there are."""
        return self.kind != "ranks" or (self.elastic or Exchange()).rank == 0

    def write_once(self, write: Callable[[], None]) -> None:
        """Call what writes files: once, however many processes there are."""
        if self.kind == "ranks":
            write_once(write, self.elastic or Exchange())
        else:
            write()

    def leave(self, *, finished: bool) -> None:
        """Take no part any more in ranks that survive the loss of others."""
        if self.elastic is not None:
            self.elastic.leave(finished=finished)

    def refuse_devices(self, devices: Sequence[torch.device]) -> None:
        """Refuse devices that replicas of this kind cannot lie on.

        Raises:
            UnsupportedError: There is one.
        """
        others = [str(device) for device in devices if device.type != "cpu"]
        if others and self.kind == "processes":
            raise UnsupportedError(
                f"`devices` must be CPUs for executor={self.kind!r}, but hold {', '.join(others)}. "
                "Use executor='threads', which serves several devices from one process."
            )


def open_executor(
    choice: ExecutorChoice,
    module: nn.Module,
    failures: FailureLog | None,
    devices: Sequence[torch.device],
    *,
    workloads: Sequence[float] | None = None,
    intra_op: int | None = None,
    shared: Sequence[object] = (),
    reads: Sequence[object] = (),
) -> Executor:
    """Open an executor.

    Args:
        choice: Of which kind.
        module: The module to run.
        failures: Takes note of worker processes that were lost; needed for those alone.
        devices: One per replica; :meth:`ExecutorChoice.refuse_devices` has let them pass.
        workloads: Relative shares; equal by default.
        intra_op: Threads inside operators, per replica.
        shared: Objects that tasks refer to; worker processes have them from their fork.
        reads: Functions that tasks call beside the module, such as the loss.
    """
    if choice.kind == "processes":
        assert failures is not None
        return ProcessExecutor(
            module,
            len(devices),
            options=choice.options,
            failures=failures,
            shared=shared,
            reads=reads,
            workloads=workloads,
            intra_op=intra_op,
        )
    kind = RankExecutor if choice.kind == "ranks" else ThreadExecutor
    executor = kind(
        module,
        devices,
        workloads=workloads,
        intra_op=intra_op,
        inline=choice.kind == "inline",
    )
    if isinstance(executor, RankExecutor):
        try:
            executor.join(choice.elastic or Exchange())
        except BaseException:
            executor.close()
            raise
    return executor
