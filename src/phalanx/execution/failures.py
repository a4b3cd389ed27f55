"""Lost worker processes: their permitted number, and the report to the user."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.clock import now_s
from phalanx.errors import PeerLost


@dataclass(frozen=True, kw_only=True)
class WorkerLost:
    """A worker process was lost in a step, which was completed without it.

    Attributes:
        step: Number of the update, from 1; of the last one done, if lost in an evaluation.
        worker: Number of the worker.
        pid: Its process number.
        reason: Its exit, signal or silence.
        microbatch: Number of its microbatch, which another worker has computed; None if idle.
        dump: Stacks of its threads, if it hung; else empty.
        seconds: Time from the notice of its death to the end of the step.
    """

    step: int = 0
    worker: int
    pid: int
    reason: str
    microbatch: int | None
    dump: str
    seconds: float = 0.0


class FailureLog:
    """Lost workers, until callbacks get them.

    Args:
        most: How many may be lost in all; None for any number.

    Attributes:
        unreported: The lost workers that :meth:`drain` has not returned yet, with their moments.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._count = 0
        self.unreported: deque[tuple[WorkerLost, float]] = deque()
        self._lock = threading.Lock()

    def add(self, lost: WorkerLost, noticed_s: float) -> None:
        """Note a lost worker, whose step and seconds :meth:`drain` fills in; called in any thread.

        Raises:
            PeerLost: It is one too many.
        """
        with self._lock:
            self._count += 1
            self.unreported.append((lost, noticed_s))
            if self._most is None or self._count <= self._most:
                return
        held = "" if lost.microbatch is None else f" while it held microbatch {lost.microbatch}"
        raise PeerLost(
            f"At most {self._most} workers may be lost (`max_failures`), but worker "
            f"{lost.worker} {lost.reason}{held}, and it is number {self._count}. If they "
            "all fall over the same data, look at it with executor='threads'.",
            lost.worker,
        )

    def drain(self, step: int) -> Iterator[WorkerLost]:
        """Yield the workers that are not reported yet; all were lost in update ``step``.

        If the caller raises at one of them, the others are left for the next time.
        """
        while self.unreported:
            lost, noticed_s = self.unreported.popleft()
            yield replace(lost, step=step, seconds=now_s() - noticed_s)
