"""The errors for ranks that died, left or came too late."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.distributed.fingerprint import describe
from phalanx.distributed.status_pages import GAVE_UP, HERE, LEFT, LOST, StatusPages
from phalanx.errors import GroupAborted, PeerError, PeerLost, PeerTimeout
from phalanx.ipc import late_peers

__all__ = ["cause_state", "is_missing", "peer_error", "timeout_error"]


def peer_error(
    pages: StatusPages, ranks: Sequence[int], progress: int, title: str = ""
) -> PeerError | None:
    """Return why a wait for ``ranks`` to reach ``progress`` cannot end well, or None.

    A rank that has reached it may be gone.
    """
    missing = [rank for rank in ranks if is_missing(pages, rank, progress)]
    during = f" during {title}" if title else ""
    again = "Destroy the group and make a new one."
    for rank in missing:
        state, _ = pages.state_of(rank)
        if state == HERE and not pages.alive(rank) and is_missing(pages, rank, progress):
            name, last = pages.names[rank], _last_of(pages, rank, pages.rank)
            text = f"Rank {name} of {pages.group_size} has died{during}. {last} {again}"
            return PeerLost(text, name)
    for rank in missing:
        name = pages.names[rank]
        state, cause = pages.state_of(rank)
        who = f"Rank {name} of {pages.group_size}"
        if state == LEFT and is_missing(pages, rank, progress):
            last = _last_of(pages, rank, pages.rank)
            return PeerLost(f"{who} has destroyed its group{during}. {last}", name)
        if state == LOST:
            last = _last_of(pages, *_named(pages, cause), pages.rank)
            found = f"has died, as rank {name} has found{during}"
            return PeerLost(f"Rank {cause} of {pages.group_size} {found}. {last} {again}", cause)
        if state == GAVE_UP:
            why = f"gave up the group{during} because of rank {cause}"
            return GroupAborted(f"{who} {why}. See the error there.", cause)
    return None


def is_missing(pages: StatusPages, rank: int, progress: int) -> bool:
    """Tell whether ``rank`` has not reached ``progress``; for no progress, always."""
    return progress <= 0 or pages.progress_of(rank) < progress


def timeout_error(
    pages: StatusPages, ranks: Sequence[int], progress: int, title: str, timeout_s: float
) -> PeerTimeout | None:
    """Name the late ranks, and every rank's last operation; None if all have come after all.

    They have where this rank itself did not run for a while.
    """
    missing = [rank for rank in ranks if is_missing(pages, rank, progress)]
    if not missing:
        return None
    slowest = min(missing, key=lambda rank: _lateness(pages, rank))
    return late_peers(
        "Rank",
        sorted(pages.names[rank] for rank in missing),
        pages.group_size,
        title,
        timeout_s,
        slowest=pages.names[slowest],
        more=_last_of(pages, *range(pages.size)),
    )


def _lateness(pages: StatusPages, rank: int) -> tuple[bool, int, int]:
    """Return a key that orders ranks by progress; a rank can be held up by those behind it."""
    runs = not pages.identity_of(rank).stopped()
    return runs, pages.latest_of(rank).number, pages.progress_of(rank)


def _last_of(pages: StatusPages, *ranks: int) -> str:
    """Say what each of ``ranks`` began last, with its number."""
    told = "; ".join(
        f"rank {pages.names[rank]}: {describe(pages.latest_of(rank))}{_hint(pages, rank)}"
        for rank in ranks
    )
    return f"The last operation of each: {told}."


def _named(pages: StatusPages, name: int) -> list[int]:
    """Return where on the pages the rank of that name is, unless it is on another host."""
    return [rank for rank, known in enumerate(pages.names) if known == name]


def _hint(pages: StatusPages, rank: int) -> str:
    return " (its process is stopped)" if pages.identity_of(rank).stopped() else ""


def cause_state(error: BaseException, name: int) -> tuple[int, int]:
    """Return the state of rank ``name`` when it stops on ``error``, and the rank that caused it."""
    cause = getattr(error, "rank", None)
    cause = name if cause is None else cause
    return (LOST if isinstance(error, PeerLost) else GAVE_UP), cause
