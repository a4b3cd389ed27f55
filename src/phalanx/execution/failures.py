"""Worker processes that were lost: how many may be, and what is told of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.clock import now_s
from phalanx.errors import ConfigError, PeerLost
from phalanx.plan import read_count, read_number

__all__ = ["FailureLog", "WorkerFailure", "WorkerLost", "check_limits", "check_seconds"]


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """A worker that was lost and is being replaced.

    Attributes:
        worker: Its number.
        pid: Its process.
        reason: What became of it.
        microbatch: What it had in hands, which another one computes; None for nothing.
        dump: Where its threads stood, if it hung.
        noticed_s: When, on the clock of `StepDone` spans.
    """

    worker: int
    pid: int
    reason: str
    microbatch: int | None
    dump: str
    noticed_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerLost:
    """A worker process was lost in a step, which was completed without it.

    Attributes:
        step: Number of the update, from 1.
        worker: Number of the worker.
        pid: Its process.
        reason: What became of it.
        microbatch: What it had in hands, which another worker has computed; None for nothing.
        dump: Where its threads stood, if it hung; else empty.
        seconds: From the moment it was noticed until the step was done.
    """

    step: int
    worker: int
    pid: int
    reason: str
    microbatch: int | None
    dump: str
    seconds: float


class FailureLog:
    """Workers that were lost, until somebody tells of them.

    Args:
        most: How many may be lost in all; None for any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._count = 0
        self._untold: deque[WorkerFailure] = deque()
        self._lock = threading.Lock()

    def add(self, failure: WorkerFailure) -> None:
        """Note a loss; called in any thread.

        Raises:
            PeerLost: It is one too many.
        """
        with self._lock:
            self._count += 1
            self._untold.append(failure)
            if self._most is None or self._count <= self._most:
                return
        held = (
            "" if failure.microbatch is None else f" while it held microbatch {failure.microbatch}"
        )
        raise PeerLost(
            f"At most {self._most} workers may be lost (`max_failures`), but worker "
            f"{failure.worker} {failure.reason}{held}, and it is number {self._count}. If they "
            "all fall over the same data, look at it with executor='threads'.",
            failure.worker,
        )

    def take(self, step: int) -> Iterator[WorkerLost]:
        """Yield the losses that nobody was told of yet; all happened in update ``step``.

        Where telling of one raises, those behind it are left for the next time.
        """
        while self._untold:
            failure = self._untold.popleft()
            yield WorkerLost(
                step=step,
                worker=failure.worker,
                pid=failure.pid,
                reason=failure.reason,
                microbatch=failure.microbatch,
                dump=failure.dump,
                seconds=now_s() - failure.noticed_s,
            )


def check_seconds(name: str, seconds: float) -> None:
    """Refuse what is no time to wait."""
    if not read_number(name, seconds) > 0:
        raise ConfigError(f"`{name}` must be above 0 seconds, but is {seconds!r}.")


def check_limits(timeout_s: float, max_failures: int | None) -> None:
    """Refuse what is no time to wait for an answer, and no number of losses."""
    check_seconds("timeout_s", timeout_s)
    if max_failures is not None:
        read_count("max_failures", max_failures, 0, way_out="Give None for any number.")
