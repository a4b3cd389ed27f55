"""From `executor=` to an executor: which kind, and with which options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.distributed import ElasticExchange, Exchange
from phalanx.errors import ConfigError
from phalanx.execution.executor import Executor
from phalanx.execution.failures import FailureLog
from phalanx.execution.processes import ProcessExecutor
from phalanx.execution.ranks import RankExecutor, write_once
from phalanx.execution.threads import ThreadExecutor
from phalanx.plan import check_argument, read_count, read_number

_KINDS = ("threads", "processes", "inline", "ranks")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Worker processes of this host, with options.

    ``executor="processes"`` is the same with the defaults.

    Args:
        timeout_s: Longest time of a microbatch, in seconds; then its worker counts as hung.
        max_failures: Number of worker processes that may be lost in all; None for any number.

    Raises:
        ConfigError: An option cannot work.

    Example:
        >>> Processes(timeout_s=60.0).max_failures
        20
    """

    timeout_s: float = 300.0
    max_failures: int | None = 20

    def __post_init__(self) -> None:
        _check_seconds("timeout_s", self.timeout_s)
        if self.max_failures is not None:
            way_out = "Give None for any number."
            read_count("max_failures", self.max_failures, 0, way_out=way_out)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Elastic ranks: if some are lost, the others continue.

    When a rank dies, the others form another group and do the step again. With ``microbatches`` the
    weights are bitwise identical to those of an undisturbed run. A new process receives the state
    from a peer between two steps. Ranks meet in their own group, so the script calls no
    `init_process_group()`; ``RANK`` and ``WORLD_SIZE`` name the first ranks.

    Args:
        timeout_s: Longest time of a live rank for its part of a step, in seconds.
        lost_after_s: Seconds without a sign of life until a rank of another host counts as lost; a
            process that ends is noticed at once.

    Raises:
        ConfigError: An option cannot work.

    Example:
        >>> Ranks(timeout_s=60.0).lost_after_s
        5.0
    """

    timeout_s: float = 300.0
    lost_after_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "lost_after_s"):
            _check_seconds(name, getattr(self, name))


def _check_seconds(name: str, seconds: float) -> None:
    """Refuse what is no time to wait."""
    if not read_number(name, seconds) > 0:
        raise ConfigError(f"`{name}` must be above 0 seconds, but is {seconds!r}.")


@dataclass(frozen=True, kw_only=True)
class ExecutorChoice:
    """The value of ``executor=``, read.

    Attributes:
        kind: "threads", "processes", "inline" or "ranks".
        options: For worker processes and elastic ranks.
        failures: Takes note of worker processes that are lost.
        elastic: The elastic ranks; None for any other executor.
    """

    kind: str
    options: Processes | Ranks | None
    failures: FailureLog
    elastic: ElasticExchange | None

    @staticmethod
    # Any: whatever the user wrote.
    def read(given: Any) -> ExecutorChoice:
        """Read a name or an object with options.

        Raises:
            ConfigError: It is neither.
        """
        options = Processes() if given == "processes" else given
        is_object = isinstance(options, (Processes, Ranks))
        named = ", ".join(map(repr, _KINDS))
        wanted = f"be one of {named}, or `Processes(…)` or `Ranks(…)`"
        check_argument(is_object or given in _KINDS, "executor", wanted, given)
        most, elastic = None, None
        if isinstance(options, Processes):
            most = options.max_failures
        elif isinstance(options, Ranks):
            elastic = ElasticExchange(
                timeout_s=options.timeout_s, lost_after_s=options.lost_after_s
            )
        return ExecutorChoice(
            kind=type(options).__name__.lower() if is_object else given,
            options=options if is_object else None,
            failures=FailureLog(most),
            elastic=elastic,
        )

    @property
    def is_first(self) -> bool:
        """True in the one process that writes files."""
        return self.kind != "ranks" or self._exchange().rank == 0

    def write_once(self, write: Callable[[], None]) -> None:
        """Call what writes files: once, however many processes there are."""
        if self.kind == "ranks":
            write_once(write, self._exchange())
        else:
            write()

    def leave(self, *, finished: bool) -> None:
        """Leave the elastic ranks, where this is one of them."""
        if self.elastic is not None:
            self.elastic.leave(finished=finished)

    def _exchange(self) -> Exchange:
        return self.elastic or Exchange()

    def open(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        intra_op: int,
        shared: Sequence[object],
        reads: Sequence[object],
    ) -> Executor:
        """Open an executor.

        Args:
            module: The module to run.
            devices: One per replica; each of a kind that the executor can use.
            intra_op: Threads inside operators, per replica.
            shared: Objects that tasks refer to; worker processes have them from their fork.
            reads: Functions that tasks call beside the module, such as the loss.
        """
        if isinstance(self.options, Processes):
            return ProcessExecutor(
                module,
                len(devices),
                timeout_s=self.options.timeout_s,
                failures=self.failures,
                shared=shared,
                reads=reads,
                intra_op=intra_op,
            )
        if self.kind == "ranks":
            return RankExecutor(module, devices, self._exchange(), intra_op=intra_op)
        inline = self.kind == "inline"
        return ThreadExecutor(module, devices, intra_op=intra_op, inline=inline)
