"""A word in shared memory that says that something has changed, and wakes who waits for that."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.ipc.liveness import CHECK_EVERY_S, Waiting
from phalanx.native import FUNCTIONS, address_of


class Changes:
    """Changes that processes announce to others that wait for them.

    Args:
        memory: Its :attr:`NBYTES` bytes, shared and zeros at first; kept.

    Example:
        >>> changes, words = Changes(memoryview(bytearray(8))), [0]
        >>> words[0] = 1
        >>> changes.tell()
        >>> changes.wait_until(lambda: words[0] == 1, timeout_s=1.0)
        True
    """

    NBYTES = 8

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory[: self.NBYTES]
        self._at = address_of(self._memory)
        self._count, self._wait = FUNCTIONS["changes"], FUNCTIONS["changes_wait"]
        self._tell = FUNCTIONS["changes_tell"]

    def tell(self) -> None:
        """Say that something has changed, after it has."""
        self._tell(self._at)

    def wait_until(
        self, ready: Callable[[], bool], timeout_s: float, check: Callable[[], object] = bool
    ) -> bool:
        """Wait until ``ready()``, asked whenever something has changed; False at the deadline.

        Args:
            ready: What it raises ends the wait.
            timeout_s: How long to wait.
            check: Called every 20 ms: looks which peers have died.
        """
        if ready():
            return True
        waiting = Waiting(timeout_s)
        while True:
            seen = self._count(self._at)
            if waiting.time_to_look():
                check()
            if ready():
                return True
            if waiting.over():
                check()
                return ready()
            slice_s = min(CHECK_EVERY_S, waiting.remaining_s())
            self._wait(self._at, seen, 1 + int(1e3 * slice_s))
