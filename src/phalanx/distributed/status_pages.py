"""The state of each rank, for the others of its host: a page per rank, which it alone writes.

    page of rank r │ progress │ state │ cause    how far it is, and whether it still takes part
                   │ awaited │ wanted │ bell     the rank it sleeps for, and until which progress
                   │ pid │ start                 its process
                   │ fingerprints of its last operations, a ring of four

native/collectives.c writes progress and sleeps; Python writes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.ipc import ProcessIdentity, Region

__all__ = ["GAVE_UP", "HERE", "LEFT", "LOST", "WORDS_PER_PAGE", "Fingerprint", "StatusPages"]

HERE, LEFT, LOST, GAVE_UP = range(4)
"""States of a rank: taking part; gone in good order; stopped because a rank was lost, or not."""

# As in native/collectives.c.
_PROGRESS, _STATE, _CAUSE = range(3)
_PID, _START = 8, 9
_FINGERPRINTS, _RING = 16, 4
WORDS_PER_PAGE = 32  # of eight bytes


class Fingerprint(NamedTuple):
    """An operation, in numbers that must be equal on all ranks."""

    number: int  # in the group, from 1
    what: int  # kind, dtype, reduction and root; see `fingerprint.pack`
    num_elements: int


class StatusPages:
    """The pages of this host's ranks, in a region of zeros, as ``rank`` sees them.

    Ranks are counted here among those of this host; ``names`` are their ranks in the group, which
    has ``group_size`` in all.
    """

    def __init__(self, region: Region, rank: int, names: Sequence[int], group_size: int) -> None:
        self.rank = rank
        self.size = size = len(names)
        self.names = names
        self.group_size = group_size
        self._words = region.buffer[: self.needed_bytes(size)].cast("q")
        self._mine = rank * WORDS_PER_PAGE
        self.others = [other for other in range(size) if other != rank]
        me = ProcessIdentity.current()
        self._words[self._mine + _START] = me.start_ticks
        self._words[self._mine + _PID] = me.pid

    @staticmethod
    def needed_bytes(size: int) -> int:
        """Return how many bytes of a region the pages take, a multiple of 64."""
        return 8 * size * WORDS_PER_PAGE

    def progress_of(self, rank: int) -> int:
        """Return how far ``rank`` is."""
        return self._words[rank * WORDS_PER_PAGE + _PROGRESS]

    # --- operations -------------------------------------------------------------------------------

    def publish(self, fingerprint: Fingerprint) -> None:
        """Say which operation this rank is in, before it posts anything of it."""
        at = self._mine + _FINGERPRINTS + _RING * (fingerprint.number % _RING)
        self._words[at + 1] = fingerprint.what
        self._words[at + 2] = fingerprint.num_elements
        self._words[at] = fingerprint.number

    def fingerprint_of(self, rank: int, number: int) -> Fingerprint:
        """Return what ``rank`` said of its ``number``-th operation."""
        at = rank * WORDS_PER_PAGE + _FINGERPRINTS + _RING * (number % _RING)
        return Fingerprint(*self._words[at : at + 3].tolist())

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

    def identity_of(self, rank: int) -> ProcessIdentity:
        """Return which process ``rank`` is."""
        at = rank * WORDS_PER_PAGE
        return ProcessIdentity(self._words[at + _PID], self._words[at + _START])

    def alive(self, rank: int) -> bool:
        """Tell whether the process of ``rank`` runs."""
        return self.identity_of(rank).alive()

    def close(self) -> None:
        """Let go of the region's memory."""
        self._words.release()
