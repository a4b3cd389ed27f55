"""How long a waiting rank spins before it sleeps: by its cores, and other work that wants them.

A rank that waits for others can spin, which is the fastest on a core of its own, or sleep on its
wake-up pipe. Where ranks outnumber cores it spins briefly: another rank may need the core. Where
another process wants the core, a rank that spins uses up its time slice, and then the kernel runs
the other process for milliseconds. A thread that slept runs soon after it is woken. So every rank
asks the kernel how long it was ready to run and had no core:

    all_reduce  all_reduce  all_reduce  all_reduce ...
    └─ window, at least 5 ms ─┘

It is *delayed* if that was a quarter of a window, in long waits: ranks that share a core without
other work wait for each other often, but briefly. A rank that was delayed is *contended* for 20 ms,
and for twice as long each time that it is delayed again soon after: to find out whether the other
work has gone costs a time slice. It says so when it begins an operation. At the end of an
all-reduce every rank reads what all have said, so all agree on how the next one is done: without
spinning and in few large pieces, because each wait may take milliseconds.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.clock import now_s

__all__ = ["Contention", "ContentionVerdict", "Waits", "is_delayed"]

_WINDOW_S = 5e-3
_DELAYED_SHARE = 0.25
_LONG_WAIT_S = 0.4e-3  # other work has the core for a time slice, of 3 ms or so
_SHORTEST_S, _LONGEST_S = 20e-3, 1.0
_SOON = 5  # times as long as the rank was contended before
_SCHEDSTAT = "/proc/thread-self/schedstat"  # ns with a core, ns ready without one, times it ran


class Waits(NamedTuple):
    """How a thread waited for a core, in a window or since it began.

    Attributes:
        waited_s: For how long it was ready to run and had no core.
        num_runs: How many times it was given a core.
    """

    waited_s: float
    num_runs: int


def is_delayed(waits: Waits, window_s: float) -> bool:
    """Tell whether a thread that waited for a core like this has competition of other work.

    Example:
        >>> is_delayed(Waits(0.1e-3, 1), 5e-3), is_delayed(Waits(2.8e-3, 1), 5e-3)
        (False, True)
        >>> is_delayed(Waits(2.8e-3, 100), 5e-3)  # two ranks on one core
        False
    """
    mean_s = waits.waited_s / max(1, waits.num_runs)
    return waits.waited_s > _DELAYED_SHARE * window_s and mean_s > _LONG_WAIT_S


@dataclass(frozen=True)
class ContentionVerdict:
    """Until when a rank counts as contended.

    Attributes:
        until_s: The moment.
        length_s: How long it was contended for when it was last delayed.

    Example:
        >>> verdict = ContentionVerdict().delayed(100.0)
        >>> verdict.holds(100.01), verdict.holds(100.03)
        (True, False)
    """

    until_s: float = 0.0
    length_s: float = _SHORTEST_S

    def holds(self, now_s: float) -> bool:
        """Tell whether the rank still counts as contended."""
        return now_s < self.until_s

    def delayed(self, now_s: float) -> ContentionVerdict:
        """Return the verdict after a delay that was seen at ``now_s``."""
        length_s = self.length_s
        if not self.holds(now_s):
            again = now_s < self.until_s + _SOON * length_s
            length_s = min(2 * length_s, _LONGEST_S) if again else _SHORTEST_S
        return ContentionVerdict(now_s + length_s, length_s)


class Contention:
    """What one of ``size`` ranks knows of the competition for the cores.

    Attributes:
        cores_per_rank: How many cores of this process there are for each rank.
        agreed: What the ranks agreed on: whether one of them was contended in the last all-reduce.
    """

    def __init__(self, size: int) -> None:
        self.cores_per_rank = len(os.sched_getaffinity(0)) / size
        self.agreed = False
        self._verdict = ContentionVerdict()
        self._began_s = 0.0
        self._thread = 0
        self._waits: Waits | None = None  # None: the kernel does not say

    @property
    def spins(self) -> bool:
        """Whether a rank that waits shall spin before it sleeps."""
        if self.agreed:
            return False
        return not self._verdict.until_s or not self._verdict.holds(now_s())  # 0: never delayed yet

    def spin_s(self, usual_s: float, crowded_s: float) -> float:
        """Return how long to spin: ``crowded_s`` where ranks outnumber cores, or not at all."""
        if not self.spins:
            return 0.0
        return usual_s if self.cores_per_rank >= 1 else crowded_s

    def begin(self) -> bool:
        """Begin an operation, and a window if none is open; tell whether this rank is contended."""
        now = now_s()
        if now >= self._began_s + _WINDOW_S:  # what lies between was not ours
            self._open_window(now)
        return self._verdict.holds(now)

    def look(self) -> None:
        """Close the window if it is long enough; called within an operation."""
        now = now_s()
        elapsed_s = now - self._began_s
        if elapsed_s < _WINDOW_S:
            return
        thread, before = self._thread, self._waits
        self._open_window(now)
        if thread != self._thread or before is None or self._waits is None:
            return
        waited_s, num_runs = self._waits
        if is_delayed(Waits(waited_s - before.waited_s, num_runs - before.num_runs), elapsed_s):
            self._verdict = self._verdict.delayed(now)

    def _open_window(self, now: float) -> None:
        self._began_s, self._thread, self._waits = now, threading.get_ident(), _own_waits()


def _own_waits() -> Waits | None:
    """Return how the calling thread has waited for a core since it began, if the kernel tells."""
    try:
        fd = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:
        return None
    try:
        _, waited_ns, num_runs = os.read(fd, 64).split()
        return Waits(int(waited_ns) * 1e-9, int(num_runs))
    finally:
        os.close(fd)
