"""Which replica computes which microbatch next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["Shares"]


class Shares:
    """Consecutive microbatches for each replica, and how a dry replica takes from others.

    A replica takes its own microbatches from the front. When it has none left it takes the last one
    of the replica with most left (the first such replica when several have as many). Who computes
    what does not show in any sum (see ``plan.tree``), so the order of calls may be left to the
    scheduler. A replica whose size is 0 from the start is switched off: it takes nothing from
    others. Without ``stealing`` everybody keeps to its own.

    Example:
        >>> shares = Shares([3, 1])
        >>> [shares.take(1), shares.take(1), shares.take(0), shares.take(1), shares.take(0)]
        [3, 2, 0, 1, None]
    """

    def __init__(self, sizes: Sequence[int], *, stealing: bool = True) -> None:
        stops = list(accumulate(sizes))
        self._steals = [stealing and size > 0 for size in sizes]
        self._next = [stop - size for stop, size in zip(stops, sizes, strict=True)]
        self._stop = stops

    def take(self, replica: int) -> int | None:
        """Return the next microbatch for ``replica``, or None when it shall rest."""
        if self._next[replica] < self._stop[replica]:
            self._next[replica] += 1
            return self._next[replica] - 1
        if not self._steals[replica]:
            return None
        left = [stop - start for start, stop in zip(self._next, self._stop, strict=True)]
        richest = max(range(len(left)), key=left.__getitem__)
        if left[richest] == 0:
            return None
        self._stop[richest] -= 1
        return self._stop[richest]
