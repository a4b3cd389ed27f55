"""How to wait for something that nobody announces: look often at first, then ever less often."""

from __future__ import annotations

import os

from phalanx.clock import now_s, pause

__all__ = ["Waiting"]

SPIN_S = 100e-6  # about what the shortest sleep takes in truth
SHORTEST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 1e-3


class Waiting:
    """One wait, from now until a deadline.

    Args:
        timeout_s: When the deadline is.

    Example:
        >>> waiting = Waiting(0.0)
        >>> waiting.over()
        True
    """

    def __init__(self, timeout_s: float) -> None:
        self._since = now_s()
        self._deadline = self._since + timeout_s
        self._sleep_s = SHORTEST_SLEEP_S

    def over(self) -> bool:
        """Tell whether the deadline has come."""
        return now_s() >= self._deadline

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - now_s())

    def rest(self) -> bool:
        """Let others run for a moment; return False where that was a spin, True for a sleep."""
        now = now_s()
        if now < self._since + SPIN_S:
            os.sched_yield()  # half a microsecond, where a sleep of 0 seconds takes seventy
            return False
        pause(max(0.0, min(self._sleep_s, self._deadline - now)))
        self._sleep_s = min(2 * self._sleep_s, LONGEST_SLEEP_S)
        return True
