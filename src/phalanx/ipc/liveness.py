"""Wait for other processes, notice those that have died, and name those that came too late.

A process that waits looks every 20 ms whether those it waits for live (`ProcessIdentity.alive`). So
the death of a peer ends the wait in that time, and a silent peer ends it at the deadline. A parent
learns of its child's death at once, by the child's sentinel (execution/worker_client.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.clock import now_s
from phalanx.errors import PeerTimeout
from phalanx.ipc.waiting import Waiting
from phalanx.plan import say_numbers

__all__ = ["LivenessTimer", "late_peers", "wait_until"]

CHECK_EVERY_S = 0.02


class LivenessTimer:
    """Says when to look again whether peers live.

    Args:
        at_once: Whether the first look is due now, and not in 20 ms.

    Example:
        >>> timer = LivenessTimer(at_once=True)
        >>> timer.due(), timer.due()
        (True, False)
    """

    def __init__(self, *, at_once: bool) -> None:
        self._next_s = 0.0 if at_once else now_s() + CHECK_EVERY_S

    def due(self) -> bool:
        """Tell whether it is time; if so, the next time is in 20 ms."""
        now = now_s()
        if now < self._next_s:
            return False
        self._next_s = now + CHECK_EVERY_S
        return True


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
    if ready():
        return True
    waiting, timer = Waiting(timeout_s), LivenessTimer(at_once=False)
    check()
    while not ready():
        if waiting.over():
            check()
            return ready()
        if waiting.rest() and timer.due():
            check()
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
