"""Where replicas fetch the microbatches of a run, and bring back those of lost workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phalanx.plan import Shares

__all__ = ["WorkQueue"]


class WorkQueue:
    """The microbatches of a run that nobody has done yet; for any thread.

    Args:
        microbatches: Which there are.
        shares: Whose they are, by place.
        active: Which replicas may take what was brought back; not those that are switched off.
    """

    def __init__(self, microbatches: Sequence[int], shares: Shares, active: Sequence[bool]) -> None:
        self._microbatches = microbatches
        self._shares = shares
        self._active = active
        self._changed = threading.Condition()
        self._returned: list[int] = []
        self._left = len(microbatches)
        self._failed = False

    @property
    def over(self) -> bool:
        """Whether all were counted as done, or something failed."""
        return self._left == 0 or self._failed

    def take(self, replica: int, wait_s: float = 0.0) -> int | None:
        """Return the next microbatch for ``replica``; None when none is left, or one failed.

        Args:
            wait_s: How long to wait for one that is brought back.
        """
        with self._changed:
            place = None if self._failed else self._shares.take(replica)
            if place is not None:
                return self._microbatches[place]
            returned = self._returned if self._active[replica] else []
            if wait_s and not returned and not self.over:
                self._changed.wait(wait_s)
            return returned.pop(0) if returned and not self._failed else None

    def give_back(self, microbatch: int) -> None:
        """Let another one compute it."""
        with self._changed:
            self._returned.append(microbatch)
            self._changed.notify_all()

    def leave_to_others(self, replica: int) -> None:
        """Give what is the share of ``replica`` to whoever is free."""
        with self._changed:
            while (place := self._shares.take(replica)) is not None:
                self._returned.append(self._microbatches[place])
                self._changed.notify_all()

    def count(self) -> None:
        """One more is done."""
        with self._changed:
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def fail(self) -> None:
        """End the run."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()
