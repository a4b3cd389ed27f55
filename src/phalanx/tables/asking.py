"""Ask several hosts at once, and do this host's part meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from phalanx.errors import PhalanxError

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.cluster import RemoteCall


def ask(begin: Iterable[Callable[[], RemoteCall]], here: Callable[[], object] = bool) -> None:
    """Begin each call, do this host's part meanwhile, and wait for all answers.

    Where one cannot begin, or this host's part fails, the others are waited for all the same, and
    notes on the error say what became of them. A Ctrl-C waits, too; a second one does not.
    """
    calls: list[RemoteCall] = []
    try:
        try:
            for each in begin:
                calls.append(each())
            here()
        except BaseException as error:
            for call in calls:
                try:
                    call.wait()
                    error.add_note(f"{call.host} has done its part of {call.title}.")
                except PhalanxError as other:
                    error.add_note(f"Also failed: {type(other).__name__}: {other}")
            raise
        wait_for(calls)
    finally:
        abandon(calls)


def wait_for(calls: Iterable[RemoteCall]) -> None:
    """Wait for all answers; the error of a host that does not answer comes before all others."""
    errors: list[tuple[bool, PhalanxError]] = []
    for call in calls:
        try:
            call.wait()
        except PhalanxError as exc:
            errors.append((call.answered, exc))
    if errors:
        raise min(errors, key=lambda each: each[0])[1]


def abandon(calls: Iterable[RemoteCall]) -> None:
    """Leave no call behind: the answer of one would come into memory that is the caller's again."""
    for call in calls:
        call.abandon()
