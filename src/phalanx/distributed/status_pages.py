"""The state of each rank, for the others of its host: a page per rank, which it alone writes.

The errors for ranks that died, left or came too late follow from the pages.

    page of rank r │ progress │ state │ cause    how far it is, and whether it still takes part
                   │ awaited │ wanted │ bell     the rank it sleeps for, and until which progress
                   │ pid │ start                 its process
                   │ fingerprints of its last operations, a ring of four

native/collectives.c writes progress and sleeps; Python writes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.distributed.fingerprint import Fingerprint, describe
from phalanx.errors import GroupAborted, PeerError, PeerLost, PeerTimeout
from phalanx.ipc import ProcessIdentity, Region, late_peers

__all__ = ["WORDS_PER_PAGE", "StatusPages"]

# States of a rank: taking part; gone in good order; stopped because a rank was lost, or not.
_HERE, _LEFT, _LOST, _GAVE_UP = range(4)

# As in native/collectives.c.
_PROGRESS, _STATE, _CAUSE = range(3)
_PID, _START = 8, 9
_FINGERPRINTS, _RING = 16, 4
WORDS_PER_PAGE = 32  # of eight bytes


class StatusPages:
    """The pages of this host's ranks, in a region of zeros, as ``rank`` sees them.

    Ranks are counted here among those of this host; ``group_ranks`` are their ranks in the group,
    which has ``group_size`` in all, and ``group_rank`` is our own.
    """

    def __init__(self, region: Region, rank: int, ranks: Sequence[int], group_size: int) -> None:
        self.rank = rank
        self.size = size = len(ranks)
        self.group_ranks = ranks
        self.group_rank = ranks[rank]
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
        self._words[at + 1] = fingerprint.code
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

    def stop(self, error: BaseException | None) -> None:
        """Say that this rank takes part no more, because of ``error`` or in good order."""
        if self._state_of(self.rank) != _HERE:
            return
        state = _LOST if isinstance(error, PeerLost) else _LEFT if error is None else _GAVE_UP
        cause = getattr(error, "rank", None)
        self._words[self._mine + _CAUSE] = self.group_rank if cause is None else cause
        self._words[self._mine + _STATE] = state

    def has_left(self, rank: int) -> bool:
        """Tell whether ``rank`` has left in good order."""
        return self._state_of(rank) == _LEFT

    def _state_of(self, rank: int) -> int:
        return self._words[rank * WORDS_PER_PAGE + _STATE]

    def identity_of(self, rank: int) -> ProcessIdentity:
        """Return which process ``rank`` is."""
        at = rank * WORDS_PER_PAGE
        return ProcessIdentity(self._words[at + _PID], self._words[at + _START])

    # --- errors -----------------------------------------------------------------------------------

    def find_error(
        self, ranks: Sequence[int], progress: int = 0, title: str = ""
    ) -> PeerError | None:
        """Return why a wait for ``ranks`` to reach ``progress`` cannot end well, or None.

        A rank that has reached it may be gone. No rank has reached 0.
        """
        missing = [rank for rank in ranks if self._is_missing(rank, progress)]
        during = f" during {title}" if title else ""
        again = "Destroy the group and make a new one."
        for rank in missing:
            is_here = self._state_of(rank) == _HERE
            died = is_here and not self.identity_of(rank).alive()
            if died and self._is_missing(rank, progress):
                name, last = self.group_ranks[rank], self._last_of(rank, self.rank)
                text = f"Rank {name} of {self.group_size} has died{during}. {last} {again}"
                return PeerLost(text, name)
        for rank in missing:
            state, name = self._state_of(rank), self.group_ranks[rank]
            cause = self._words[rank * WORDS_PER_PAGE + _CAUSE]
            who = f"Rank {name} of {self.group_size}"
            if state == _LEFT and self._is_missing(rank, progress):
                last = self._last_of(rank, self.rank)
                return PeerLost(f"{who} has destroyed its group{during}. {last}", name)
            if state == _LOST:
                here = [rank for rank, known in enumerate(self.group_ranks) if known == cause]
                last = self._last_of(*here, self.rank)
                found = f"has died, as rank {name} has found{during}"
                return PeerLost(f"Rank {cause} of {self.group_size} {found}. {last} {again}", cause)
            if state == _GAVE_UP:
                why = f"gave up the group{during} because of rank {cause}"
                return GroupAborted(f"{who} {why}. See the error there.", cause)
        return None

    def timeout_error(
        self, ranks: Sequence[int], progress: int, title: str, timeout_s: float
    ) -> PeerTimeout | None:
        """Name the late ranks, and every rank's last operation; None if all have come after all.

        They have where this rank itself did not run for a while.
        """
        missing = [rank for rank in ranks if self._is_missing(rank, progress)]
        if not missing:
            return None
        return late_peers(
            "Rank",
            sorted(self.group_ranks[rank] for rank in missing),
            self.group_size,
            title,
            timeout_s,
            slowest=self.group_ranks[min(missing, key=self._lateness)],
            more=self._last_of(*range(self.size)),
        )

    def _is_missing(self, rank: int, progress: int) -> bool:
        return progress <= 0 or self.progress_of(rank) < progress

    def _lateness(self, rank: int) -> tuple[bool, int, int]:
        """Return a key that orders ranks by progress; a rank can be held up by those behind it."""
        runs = not self.identity_of(rank).stopped()
        return runs, self.latest_of(rank).number, self.progress_of(rank)

    def _last_of(self, *ranks: int) -> str:
        """Say what each of ``ranks`` began last, with its number."""
        told = []
        for rank in ranks:
            hint = " (its process is stopped)" * self.identity_of(rank).stopped()
            told.append(f"rank {self.group_ranks[rank]}: {describe(self.latest_of(rank))}{hint}")
        return f"The last operation of each: {'; '.join(told)}."

    # ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the region's memory."""
        self._words.release()
