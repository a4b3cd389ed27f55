"""Ask several hosts at once, and do this host's part meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from phalanx.errors import PhalanxError

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.cluster import PendingCall
    from phalanx.tables.remote_part import RemotePart

__all__ = ["Pending", "abandon", "ask", "wait_for", "with_all"]

Pending = tuple["RemotePart", "PendingCall"]


def ask(begin: Sequence[Callable[[], Pending]], here: Callable[[], object] = bool) -> None:
    """Begin each call, do this host's part meanwhile, and wait for all answers.

    Where one cannot begin, or this host's part fails, the others are waited for all the same, and
    notes on the error say what became of them. A Ctrl-C waits, too; a second one does not.
    """
    pendings: list[Pending] = []
    try:
        try:
            for each in begin:
                pendings.append(each())
            here()
        except BaseException as error:
            for part, pending in pendings:
                try:
                    part.wait(pending)
                    error.add_note(f"{part.remote.name} has done its part of {pending.title}.")
                except PhalanxError as other:
                    error.add_note(f"Also failed: {type(other).__name__}: {other}")
            raise
        wait_for(pendings)
    finally:
        abandon(pendings)


def wait_for(pendings: Sequence[Pending]) -> None:
    """Wait for all answers; the error of a host that does not answer comes before all others."""
    errors: list[tuple[bool, PhalanxError]] = []
    for part, pending in pendings:
        try:
            part.wait(pending)
        except PhalanxError as exc:
            errors.append((pending.answered, exc))
    if errors:
        raise min(errors, key=lambda each: each[0])[1]


def abandon(pendings: Iterable[Pending]) -> None:
    """Leave no call behind: the answer of one would come into memory that is the caller's again."""
    for part, pending in pendings:
        part.abandon(pending)


def with_all(locks: Sequence[threading.Lock], call: Callable[[], None]) -> None:
    """Call while all locks are held.

    By recursion: between taking a lock and noting it, an `ExitStack` has moments at which a Ctrl-C
    leaves it held for good, and a `with` has none.
    """
    if not locks:
        call()
        return
    with locks[0]:
        with_all(locks[1:], call)
