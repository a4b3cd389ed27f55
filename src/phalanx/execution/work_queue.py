"""Where the threads of a process executor fetch microbatches, and bring lost workers' back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phalanx.execution.contract import RunState

__all__ = ["WorkQueue"]


class WorkQueue:
    """Where threads fetch microbatches, and bring back those of workers that were lost.

    Args:
        active: Who may take what was brought back; not those that are switched off.
    """

    def __init__(self, state: RunState, active: Sequence[bool]) -> None:
        self._state = state
        self._active = active
        self._changed = threading.Condition()
        self._returned: list[int] = []
        self._left = len(state.queue)

    @property
    def over(self) -> bool:
        """Whether everything is done, or something failed."""
        return self._left == 0 or self._state.failed

    def take(self, replica: int, timeout_s: float) -> int | None:
        """Return the next microbatch; wait a while, as others might still bring one back."""
        with self._changed:
            microbatch = self._take(replica)
            if microbatch is None and not self.over:
                self._changed.wait(timeout_s)
                microbatch = self._take(replica)
        return microbatch

    def _take(self, replica: int) -> int | None:
        if self.over:
            return None
        microbatch = self._state.take(replica)
        if microbatch is None and self._returned and self._active[replica]:
            microbatch = self._returned.pop(0)
        return microbatch

    def give_back(self, microbatch: int) -> None:
        """Let another one compute it."""
        with self._changed:
            self._returned.append(microbatch)
            self._changed.notify_all()

    def leave_to_others(self, replica: int) -> None:
        """Give what only ``replica`` would take to whoever is free."""
        if self._state.pinned:
            while (microbatch := self._state.take(replica)) is not None:
                self.give_back(microbatch)

    def count(self) -> None:
        """One more is done."""
        with self._changed:
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def fail(self) -> None:
        """End the run."""
        with self._changed:
            self._state.failed = True
            self._changed.notify_all()
