"""Bugs that are planted in the backend `phalanx`, to see that somebody notices.

Each is a function that breaks this process's groups, by name in :data:`BUGS`; the process is not
needed for anything else afterwards. What a bug leaves out, or does too early, its docstring says.
Where a bug opens a window, it also loses the processor in it, as a rank may at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.clock import pause
from phalanx.distributed import peer_errors
from phalanx.distributed.collective_buffers import CollectiveBuffers, Need, Steps
from phalanx.distributed.engine import CallEngine
from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.status_pages import LEFT, StatusPages
from phalanx.distributed.wake_up_pipes import WakeUpPipes

Patch = Callable[[Any, str, Any], None]  # as `setattr`, or pytest's

_WINDOW_S = 20e-3


def deaths_unseen(patch: Patch) -> None:
    """Nobody looks whether a rank lives."""
    patch(StatusPages, "alive", lambda self, rank: True)


def deaths_not_told(patch: Patch) -> None:
    """Who has found a rank gone does not tell the others."""
    patch(StatusPages, "stop", lambda self, state, cause: None)


def progress_unread(patch: Patch) -> None:
    """Nobody waits for anybody: results are made of whatever lies in the slots."""
    patch(StatusPages, "reached", lambda self, ranks, progress: True)
    patch(CollectiveBuffers, "_check", lambda self, ranks: None)


def posted_before_data(patch: Patch) -> None:
    """A piece is said to be there when its turn has come, and written after that."""
    begin_piece = CollectiveBuffers.begin_piece

    def too_early(self: CollectiveBuffers) -> Steps:
        yield from begin_piece(self)
        self.publish()
        pause(_WINDOW_S)

    patch(CollectiveBuffers, "begin_piece", too_early)


def done_before_reading(patch: Patch) -> None:
    """A rank says that it reads no more when what it is to read has come."""
    published = CollectiveBuffers.published

    def too_early(self: CollectiveBuffers, ranks: Sequence[int] | None = None) -> Steps:
        yield from published(self, ranks)
        self.end_piece()
        pause(_WINDOW_S)

    patch(CollectiveBuffers, "published", too_early)


def slot_taken_early(patch: Patch) -> None:
    """A slot is written again one piece too early: its last readers are not waited for."""
    reach = CollectiveBuffers._reach

    def too_soon(self: CollectiveBuffers, ranks: Sequence[int], progress: int) -> Steps:
        done = progress % 3 == 0
        yield from reach(self, ranks, progress - 3 if done else progress)

    patch(CollectiveBuffers, "_reach", too_soon)


def fingerprints_not_compared(patch: Patch) -> None:
    """Ranks in different calls take each other's numbers."""
    patch(CollectiveBuffers, "_check", lambda self, ranks: None)


def leavers_missed(patch: Patch) -> None:
    """Who has given its part and left is taken for lost."""
    is_missing = peer_errors.is_missing

    def whoever_left(pages: StatusPages, rank: int, progress: int) -> bool:
        return pages.state_of(rank)[0] == LEFT or is_missing(pages, rank, progress)

    patch(peer_errors, "is_missing", whoever_left)


def wake_ups_lost(patch: Patch) -> None:
    """Nobody is woken."""
    patch(WakeUpPipes, "wake", lambda self, rank: None)


def said_too_late(patch: Patch) -> None:
    """A rank looks for the last time before it says for whom it sleeps, and not after that."""
    fall_asleep, sleep = WakeUpPipes.fall_asleep, WakeUpPipes.sleep
    awaited: list[tuple[int, int]] = []
    patch(WakeUpPipes, "fall_asleep", lambda self, rank, progress: awaited.append((rank, progress)))

    def too_late(self: WakeUpPipes, timeout_s: float) -> None:
        pause(_WINDOW_S)
        while awaited:
            fall_asleep(self, *awaited.pop())
        sleep(self, timeout_s)

    patch(WakeUpPipes, "sleep", too_late)


def looked_no_more(patch: Patch) -> None:
    """A rank does not look again where all that it waits for has come before it fell asleep."""
    rest, advance = CallEngine.rest, CallEngine.advance

    def without_a_look(self: CallEngine, need: Need, times: int) -> bool:
        ranks, progress = need
        if progress > 0 and self._pages.reached(ranks, progress):
            looks = iter([False])
            self.advance = lambda: next(looks, None) is None and advance(self)  # type: ignore[method-assign]
        try:
            return rest(self, need, times)
        finally:
            self.__dict__.pop("advance", None)

    patch(CallEngine, "rest", without_a_look)


def contention_not_agreed(patch: Patch) -> None:
    """Each rank goes by what it has said itself, and cuts its tensors in pieces of its own."""

    def own(self: StatusPages, number: int) -> bool:
        return bool(self._words[self._mine + 16 + 4 * (number % 4) + 3])

    patch(StatusPages, "any_contended", own)


def pipes_kept(patch: Patch) -> None:
    """A group that is destroyed leaves its pipes open."""
    patch(WakeUpPipes, "close", lambda self: None)


def errors_not_told(patch: Patch) -> None:
    """Nobody tells other hosts why the group has ended."""
    patch(ErrorStore, "write", lambda self, error: None)


BUGS_ACROSS: dict[str, Callable[[Patch], None]] = {"errors_not_told": errors_not_told}
"""Those that show in groups of several hosts alone."""

BUGS: dict[str, Callable[[Patch], None]] = {
    bug.__name__: bug
    for bug in (
        deaths_unseen,
        deaths_not_told,
        progress_unread,
        posted_before_data,
        done_before_reading,
        slot_taken_early,
        fingerprints_not_compared,
        leavers_missed,
        wake_ups_lost,
        said_too_late,
        looked_no_more,
        contention_not_agreed,
        pipes_kept,
    )
}
