"""The state of each rank, for the others of its host: a page per rank, which it alone writes.

    page of rank r │ progress │ state │ cause      how far it is, and whether it still takes part
                   │ awaited │ wanted              the rank it sleeps for, and until which progress
                   │ pid │ start │ pipe │ inbox    its process, and how to wake and write to it
                   │ fingerprints of its last operations, a ring of four

*Progress* is a counter that only grows. A rank that needs something of another waits until the
other's progress has reached the number at which it is there. Python stores eight aligned bytes at
once and nobody writes another's page, so nothing has to be atomic beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from phalanx.ipc import ProcessIdentity, Region, fence

__all__ = ["GAVE_UP", "HERE", "LEFT", "LOST", "WORDS_PER_PAGE", "Fingerprint", "StatusPages"]

HERE, LEFT, LOST, GAVE_UP = range(4)
"""States of a rank: taking part; gone in good order; stopped because a rank was lost, or not."""

_PROGRESS, _STATE, _CAUSE, _AWAITED, _WANTED = range(5)
_PID, _START, _PIPE, _INBOX = range(8, 12)
_FINGERPRINTS, _RING = 16, 4
WORDS_PER_PAGE = 32  # of eight bytes


class Fingerprint(NamedTuple):
    """What an operation is, in numbers that must be equal on all ranks.

    Attributes:
        number: Sequence number in the group, from 1.
        what: Its kind, dtype, reduction and root, packed by :mod:`phalanx.distributed.fingerprint`.
        num_elements: How many.
    """

    number: int
    what: int
    num_elements: int


class StatusPages:
    """The pages of some ranks in a region of zeros, seen by one of them.

    Args:
        region: The memory.
        rank: Whose view it is: the index among those here, as everywhere below.
        names: The rank of each in its group, by index.
        group_size: How many ranks the group has, here or on other hosts.

    Attributes:
        size: How many there are here.
    """

    def __init__(self, region: Region, rank: int, names: Sequence[int], group_size: int) -> None:
        self.rank = rank
        self.size = size = len(names)
        self.names = names
        self.group_size = group_size
        self._words = region.buffer[: self.needed_bytes(size)].cast("q")
        self._mine = rank * WORDS_PER_PAGE
        self.others = [other for other in range(size) if other != rank]
        self.wake: Callable[[int], object] = bool  # until there are pipes, nobody sleeps
        self._woken_for: dict[int, int] = {}
        self.offsets = [(other, other * WORDS_PER_PAGE) for other in self.others]
        me = ProcessIdentity.current()
        self._words[self._mine + _START] = me.start_ticks
        self._words[self._mine + _PID] = me.pid

    @staticmethod
    def needed_bytes(size: int) -> int:
        """Return how many bytes of a region the pages take, a multiple of 64."""
        return 8 * size * WORDS_PER_PAGE

    @classmethod
    def is_in(cls, region: Region, rank: int, size: int, owner: ProcessIdentity) -> bool:
        """Tell whether the region holds the pages of ``size`` ranks, the one of ``rank`` owned."""
        words = region.buffer[: cls.needed_bytes(size)].cast("q")
        at = rank * WORDS_PER_PAGE
        return (words[at + _PID], words[at + _START]) == owner

    def post(self, progress: int) -> None:
        """Set this rank's progress; all that was written before is seen then."""
        fence()
        self._words[self._mine + _PROGRESS] = progress
        self.wake_sleepers(progress)

    def wake_sleepers(self, progress: int) -> None:
        """Wake the ranks that sleep until this one has reached ``progress``."""
        words, me = self._words, self.rank + 1
        for other, at in self.offsets:
            if words[at + _AWAITED] == me:
                wanted = words[at + _WANTED]
                if wanted <= progress and self._woken_for.get(other) != wanted:
                    self._woken_for[other] = wanted  # it takes a while to wake; once is enough
                    self.wake(other)

    def nudge(self, rank: int) -> None:
        """Wake ``rank`` if it sleeps for a message of this rank's, or until one is taken."""
        at = rank * WORDS_PER_PAGE
        if self._words[at + _AWAITED] == self.rank + 1 and self._words[at + _WANTED] <= 0:
            self.wake(rank)

    def wait_for(self, rank: int | None, progress: int = 0) -> None:
        """Say which rank this one sleeps for, and until which progress; None when it is awake."""
        self._words[self._mine + _WANTED] = progress
        self._words[self._mine + _AWAITED] = 0 if rank is None else rank + 1

    def progress_of(self, rank: int) -> int:
        """Return how far ``rank`` is."""
        return self._words[rank * WORDS_PER_PAGE + _PROGRESS]

    def reached(self, ranks: Sequence[int], progress: int) -> bool:
        """Tell whether all of ``ranks`` have come as far as ``progress``."""
        words = self._words
        for rank in ranks:  # noqa: SIM110 - with a generator it takes twice as long
            if words[rank * WORDS_PER_PAGE] < progress:
                return False
        return True

    # --- operations -------------------------------------------------------------------------------

    def publish(self, fingerprint: Fingerprint, *, contended: bool = False) -> None:
        """Say which operation this rank is in, before it posts anything of it."""
        at = self._mine + _FINGERPRINTS + _RING * (fingerprint.number % _RING)
        self._words[at + 1] = fingerprint.what
        self._words[at + 2] = fingerprint.num_elements
        self._words[at + 3] = contended
        self._words[at] = fingerprint.number

    def fingerprint_of(self, rank: int, number: int) -> Fingerprint:
        """Return what ``rank`` said of its ``number``-th operation."""
        at = rank * WORDS_PER_PAGE + _FINGERPRINTS + _RING * (number % _RING)
        return Fingerprint(*self._words[at : at + 3].tolist())

    def any_contended(self, number: int) -> bool:
        """Tell whether any rank said so with the ``number``-th operation, which all have begun."""
        words, first = self._words, _FINGERPRINTS + _RING * (number % _RING) + 3
        for at in range(first, first + self.size * WORDS_PER_PAGE, WORDS_PER_PAGE):
            if words[at]:
                return True
        return False

    def latest_of(self, rank: int) -> Fingerprint:
        """Return the last operation that ``rank`` began; its number is 0 if there was none."""
        return max(self.fingerprint_of(rank, number) for number in range(_RING))

    # --- taking part ------------------------------------------------------------------------------

    def stop(self, state: int, cause: int) -> None:
        """Say that this rank takes part no more because of one named ``cause``; the first holds."""
        if self._words[self._mine + _STATE] == HERE:
            self._words[self._mine + _CAUSE] = cause
            self._words[self._mine + _STATE] = state

    def state_of(self, rank: int) -> tuple[int, int]:
        """Return the state of ``rank`` and the name of the rank that caused it."""
        at = rank * WORDS_PER_PAGE
        return self._words[at + _STATE], self._words[at + _CAUSE]

    def identity_of(self, rank: int) -> ProcessIdentity | None:
        """Return which process ``rank`` is; None before it has come."""
        at = rank * WORDS_PER_PAGE
        pid, start = self._words[at + _PID], self._words[at + _START]
        return ProcessIdentity(pid, start) if pid else None

    def alive(self, rank: int) -> bool:
        """Tell whether the process of ``rank`` runs, or has not come yet."""
        identity = self.identity_of(rank)
        return identity is None or identity.alive()

    def offer_pipe(self, fd: int) -> None:
        """Let the others know the descriptor of this rank's pipe."""
        self._words[self._mine + _PIPE] = fd

    def pipe_of(self, rank: int) -> int:
        """Return the descriptor, in its own process, of the pipe of ``rank``, which has come."""
        return self._words[rank * WORDS_PER_PAGE + _PIPE]

    # --- messages ---------------------------------------------------------------------------------

    def offer_inbox(self, fd: int) -> None:
        """Let the others know the descriptor of the region that takes this rank's messages."""
        self._words[self._mine + _INBOX] = fd + 1

    def inbox_of(self, receiver: int) -> int | None:
        """Return that region's descriptor in the receiver's process; None before it has one."""
        fd = self._words[receiver * WORDS_PER_PAGE + _INBOX]
        return fd - 1 if fd else None

    def close(self) -> None:
        """Let go of the region's memory."""
        self._words.release()
