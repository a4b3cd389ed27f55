"""Wait for other processes, notice those that have died, and name those that came too late.

A process that waits looks every 20 ms whether those it waits for live (`ProcessIdentity.alive`). So
the death of a peer ends the wait in that time, and a silent peer ends it at the deadline. A parent
learns of its child's death at once, by the child's sentinel (execution/worker_process.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.clock import now_s, pause
from phalanx.errors import PeerTimeout
from phalanx.plan import say_numbers

CHECK_EVERY_S = 0.02
_SHORTEST_S = 50e-6
_LATE = 1 / 32  # of a wait, so much later at most: many who wait would keep the others busy


class Waiting:
    """One wait, from now until a deadline, for a change without a signal: ever longer looks apart.

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
        self._look_s = self._since

    def over(self) -> bool:
        """Tell whether the deadline has come."""
        return now_s() >= self._deadline

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - now_s())

    def time_to_look(self) -> bool:
        """Tell whether to look if peers live: at once, and every 20 ms from then on."""
        now = now_s()
        is_time = now >= self._look_s
        if is_time:
            self._look_s = now + CHECK_EVERY_S
        return is_time

    def rest(self) -> None:
        """Let others run for a moment."""
        rest_s = max(_SHORTEST_S, (now_s() - self._since) * _LATE)
        pause(min(rest_s, CHECK_EVERY_S, self.remaining_s()))


def wait_until(
    ready: Callable[[], bool], timeout_s: float, check: Callable[[], object] = bool
) -> bool:
    """Wait until ``ready()``, and call ``check`` every 20 ms; return False at the deadline.

    Args:
        ready: Asked often; what it raises ends the wait.
        timeout_s: How long to wait.
        check: Looks which peers have died. It raises, or changes what ``ready`` sees.

    Example:
        >>> wait_until(lambda: False, timeout_s=0.0)
        False
    """
    waiting = Waiting(timeout_s)
    while not ready():
        if waiting.over():
            check()
            return ready()
        if waiting.time_to_look():
            check()
        else:
            waiting.rest()
    return True


def late_peers(
    noun: str,
    missing: Sequence[int],
    size: int,
    event: str,
    timeout_s: float,
    *,
    came: Sequence[int] = (),
    slowest: int | None = None,
    more: str = "",
) -> PeerTimeout:
    """Return the error of a wait that ended without ``missing``.

    Args:
        noun: What a peer is called.
        missing: Peers that did not come, ascending; at least one.
        size: How many were awaited in all.
        event: What they did not come to.
        timeout_s: How long they were waited for.
        came: Peers that came, if they are to be named.
        slowest: The error's ``.rank``; None for the first of ``missing``.
        more: Sentences that follow.

    Example:
        >>> print(late_peers("Worker", [3], 4, "barrier 'epoch'", 30.0, came=[0, 1, 2]))
        Worker 3 of 4 did not come to barrier 'epoch' within 30 s; workers 0–2 did.
    """
    others = f"; {say_numbers(noun, came).lower()} did" if came else ""
    return PeerTimeout(
        f"{say_numbers(noun, missing)} of {size} did not come to {event} within {timeout_s:g} s"
        f"{others}. {more}".rstrip(),
        missing[0] if slowest is None else slowest,
    )
