"""A lock in shared memory, which the kernel frees when its holder dies, and news of changes.

Both are native/lock.c's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.errors import PeerTimeout
from phalanx.ipc.liveness import CHECK_EVERY_S, Waiting
from phalanx.native import FUNCTIONS, address_of, require_library

_SLICE_MS = 20  # a thread that waits in C hears of no Ctrl-C before it comes back


class Mutex:
    """A lock that excludes threads and processes alike; the kernel frees it at a holder's death.

    What a dead holder had half written stays half written: the next holder looks. It is not
    reentrant. A KeyboardInterrupt that comes as a block begins or ends may leave the lock with its
    thread. The thread then finds it free at its next call, as others do when the thread ends.

    Args:
        memory: Its :attr:`NBYTES` bytes, shared and zeros at first; kept.
        label: What it is called in messages.
        rank_of: Tells as which rank a process works, if as one; for errors.

    Raises:
        UnsupportedError: The C library was not built.

    Example:
        >>> mutex = Mutex(memoryview(bytearray(Mutex.NBYTES)), "rows")
        >>> with mutex.held():
        ...     mutex.owner == os.getpid()
        True
        >>> mutex.owner
        0
    """

    NBYTES = 128  # as in native.h

    def __init__(
        self,
        memory: memoryview,
        label: str,
        rank_of: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        require_library("Locks in shared memory")
        self.label = label
        self._memory = memory[: self.NBYTES]
        self._rank_of = rank_of
        self.address = address_of(self._memory)
        self._take_in_c, self._release_in_c = FUNCTIONS["lock_take"], FUNCTIONS["lock_release"]
        FUNCTIONS["lock_make"](self.address)

    @property
    def owner(self) -> int:
        """The number of the process that holds it, or died holding it; 0 if none."""
        return int(FUNCTIONS["lock_owner"](self.address))

    @contextmanager
    def held(self, timeout_s: float = 30.0) -> Iterator[None]:
        """Hold the lock: ``with mutex.held(): …``.

        Raises:
            PeerTimeout: Others held it for ``timeout_s`` seconds; ``.rank`` is who does now.

        Blocks: Until no other thread or process holds it.
        """
        try:
            if self._take_in_c(self.address, 0):
                self._wait(timeout_s)
            yield
        finally:
            self._release_in_c(self.address)  # if this thread holds it

    def _wait(self, timeout_s: float) -> None:
        waiting = Waiting(timeout_s)
        while self._take_in_c(self.address, min(_SLICE_MS, 1 + int(1e3 * waiting.remaining_s()))):
            if waiting.over():
                raise self.late(timeout_s)

    def late(self, timeout_s: float) -> PeerTimeout:
        """Return the error of who has waited for so long."""
        pid = self.owner
        me = " (this one)" * (pid == os.getpid())
        who = f"process {pid}{me} holds it" if pid else "others held it in turn"
        return PeerTimeout(
            f"Lock {self.label!r} did not become free within {timeout_s:g} s: {who}.",
            None if pid in (0, os.getpid()) else self._rank_of(pid),
        )


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
