"""From `executor=` to an executor: which kind, what that can do, and where its memory lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.distributed import ElasticExchange, Exchange, nccl_is_here
from phalanx.errors import UnsupportedError
from phalanx.execution.contract import Executor
from phalanx.execution.elastic_ranks import ElasticRankExecutor, write_once_elastic
from phalanx.execution.failures import FailureLog, check_limits, check_seconds
from phalanx.execution.processes import ProcessExecutor
from phalanx.execution.ranks import RankExecutor, write_once
from phalanx.execution.threads import ThreadExecutor
from phalanx.plan import check_argument, read_intra_op

__all__ = [
    "EXECUTORS",
    "ExecutorChoice",
    "Processes",
    "Ranks",
    "Threads",
    "check_reduce",
    "nccl_serves",
    "open_executor",
    "refuse_without_nccl",
]

_REDUCTIONS = ("tree", "nccl")
EXECUTORS = ("threads", "processes", "inline", "ranks")


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Replicas in threads of this process, with options.

    ``executor="threads"`` is the same with the defaults.

    Args:
        intra_op: Threads inside operators, per replica. Default: cores divided by replicas. With
            microbatches every operator runs on one thread, because their number decides the bits.
        nccl: Sum gradients on each GPU, and then over all GPUs by NCCL. The order of the sums, and
            so their rounding, is NCCL's and depends on the number of GPUs.

    Raises:
        ConfigError: An option cannot work.

    Example:
        >>> Threads(intra_op=2).nccl
        False
    """

    intra_op: int | None = None
    nccl: bool = False

    def __post_init__(self) -> None:
        read_intra_op(self.intra_op)
        check_argument(isinstance(self.nccl, bool), "nccl", "be True or False", self.nccl)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Worker processes of this host, with options.

    ``executor="processes"`` is the same with the defaults.

    Args:
        intra_op: As for `Threads`.
        timeout_s: How long a microbatch may take before its worker process counts as hung.
        max_failures: How many worker processes may be lost in all; None for any number.

    Raises:
        ConfigError: An option cannot work.

    Example:
        >>> Processes(timeout_s=60.0).max_failures
        20
    """

    intra_op: int | None = None
    timeout_s: float = 300.0
    max_failures: int | None = 20

    def __post_init__(self) -> None:
        read_intra_op(self.intra_op)
        check_limits(self.timeout_s, self.max_failures)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that survive the loss of others.

    When a rank dies, those left form another group and do the step again: the weights are the same
    bits as if nothing had happened, given ``microbatches``. A process that comes in its place, or
    later, is given the state by a peer between two steps. They meet in a group of their own, so the
    script calls no `init_process_group()`; ``RANK`` and ``WORLD_SIZE`` say who comes at first.

    Every rank holds all of the optimizer's state, where ``executor="ranks"`` holds some of it.

    Args:
        intra_op: As for `Threads`.
        timeout_s: How long a rank that lives may take for its part of a step.
        lost_after_s: After how long without a sign of life a rank of another host counts as lost;
            a process that ends is noticed at once.

    Raises:
        ConfigError: An option cannot work.

    Example:
        >>> Ranks(timeout_s=60.0).lost_after_s
        5.0
    """

    intra_op: int | None = None
    timeout_s: float = 300.0
    lost_after_s: float = 5.0

    def __post_init__(self) -> None:
        read_intra_op(self.intra_op)
        for name in ("timeout_s", "lost_after_s"):
            check_seconds(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ExecutorChoice:
    """The value of ``executor=``, read.

    Attributes:
        kind: "threads", "processes", "inline" or "ranks".
        options: The options of worker processes; the defaults for other kinds, which lose none.
        intra_op: Threads inside operators, per replica; None for the default.
        elastic: The ranks that survive the loss of others; None for any others.
        nccl: Whether gradients are summed by NCCL.
    """

    kind: str
    options: Processes = Processes()
    intra_op: int | None = None
    elastic: ElasticExchange | None = None
    nccl: bool = False

    @staticmethod
    # Any: whatever the user wrote.
    def read(given: Any) -> ExecutorChoice:
        """Read a name or an object with options.

        Raises:
            ConfigError: It is neither.
        """
        known = isinstance(given, (Threads, Processes, Ranks)) or (
            isinstance(given, str) and given in EXECUTORS
        )
        named = ", ".join(map(repr, EXECUTORS))
        others = "`Threads(…)`, `Processes(…)` or `Ranks(…)`"
        check_argument(known, "executor", f"be one of {named}, or {others}", given)
        if isinstance(given, str):
            return ExecutorChoice(kind=given)
        if isinstance(given, Threads):
            return ExecutorChoice(kind="threads", intra_op=given.intra_op, nccl=given.nccl)
        if isinstance(given, Processes):
            return ExecutorChoice(kind="processes", options=given, intra_op=given.intra_op)
        elastic = ElasticExchange(timeout_s=given.timeout_s, lost_after_s=given.lost_after_s)
        return ExecutorChoice(kind="ranks", intra_op=given.intra_op, elastic=elastic)

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes files, however many there are."""
        if self.elastic is not None:
            return self.elastic.rank == 0
        return self.kind != "ranks" or Exchange().rank == 0

    def write_once(self, write: Callable[[], None]) -> None:
        """Call what writes files: once, however many processes there are."""
        if self.elastic is not None:
            write_once_elastic(write, self.elastic)
        elif self.kind == "ranks":
            write_once(write, Exchange())
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
        if self.nccl:
            refuse_without_nccl(devices, "nccl=True")
        others = [str(device) for device in devices if device.type != "cpu"]
        if others and self.kind == "processes":
            raise UnsupportedError(
                f"`devices` must be CPUs for executor={self.kind!r}, but hold {', '.join(others)}. "
                "Use executor='threads', which serves several devices from one process."
            )


def nccl_serves(devices: Sequence[torch.device]) -> bool:
    """Tell whether NCCL can sum over these devices."""
    on_cuda = all(device.type == "cuda" for device in devices)
    return on_cuda and nccl_is_here()


# Any: whatever the user wrote.
def check_reduce(reduce: Any) -> None:
    """Refuse a way of summing gradients that is unknown.

    Raises:
        ConfigError: It is unknown.
    """
    fits = isinstance(reduce, str) and reduce in _REDUCTIONS
    check_argument(fits, "reduce", "be 'tree' or 'nccl'", reduce)


def refuse_without_nccl(devices: Sequence[torch.device], option: str) -> None:
    """Refuse devices that NCCL does not serve.

    Args:
        option: The option that asks for it, such as "nccl=True".

    Raises:
        UnsupportedError: There is one.
    """
    if not nccl_serves(devices):
        named = ", ".join(dict.fromkeys(map(str, devices)))
        raise UnsupportedError(
            f"Devices must be CUDA's for {option}, and torch must be built with NCCL, but the "
            f"devices are {named}. Leave {option} out."
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
    timed: bool = False,
) -> Executor:
    """Open an executor.

    Args:
        choice: Of which kind.
        module: The module to run.
        failures: Takes note of worker processes that were lost; needed for those alone.
        devices: One per replica.
        workloads: Relative shares; equal by default.
        intra_op: Threads inside operators, per replica.
        shared: Objects that tasks refer to; worker processes have them from their fork.
        reads: Functions that tasks call beside the module, such as the loss.
        timed: Measure replicas on devices that work behind their thread's back.
    """
    choice.refuse_devices(devices)
    if choice.kind == "processes":
        assert failures is not None
        return ProcessExecutor(
            module,
            len(devices),
            failures=failures,
            shared=shared,
            reads=reads,
            workloads=workloads,
            intra_op=intra_op,
            timeout_s=choice.options.timeout_s,
        )
    executor = _kind(choice)(
        module,
        devices,
        workloads=workloads,
        intra_op=intra_op,
        timed=timed,
        inline=choice.kind == "inline",
        nccl=choice.nccl,
    )
    if isinstance(executor, RankExecutor):
        try:
            executor.join(choice.elastic)
        except BaseException:
            executor.close()
            raise
    return executor


def _kind(choice: ExecutorChoice) -> type[ThreadExecutor]:
    if choice.elastic is not None:
        return ElasticRankExecutor
    return RankExecutor if choice.kind == "ranks" else ThreadExecutor
