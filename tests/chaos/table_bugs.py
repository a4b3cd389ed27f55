"""Bugs that are planted in parameter tables, to see that somebody notices.

Each is a function that breaks this process's tables, by name in :data:`BUGS`; a child is given the
name. The real code is never far: what a bug leaves out, or does twice, stands in its docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from phalanx.ipc import Mutex, Waiting
from phalanx.tables import keys, part
from phalanx.tables.keys import KeyPart
from phalanx.tables.membership import Membership
from phalanx.tables.part import Entry, TablePart
from phalanx.tables.table import Table

Patch = Callable[[Any, str, Any], None]  # as `setattr`, or pytest's

_WORD, _AT = part._WORD, part._AT


def _in_python(patch: Patch) -> None:
    """Have every add made by Python code, where bugs can be planted."""
    patch(TablePart, "add", TablePart._add_in_python)


def undo_not_applied(patch: Patch) -> None:
    """Who finds an add half done leaves its rows as they are."""
    patch(TablePart, "_put_back", lambda self: None)


def undo_applied_twice(patch: Patch) -> None:
    """An add that has ended still counts as begun, so the next one undoes it again."""
    _in_python(patch)
    end = TablePart._end

    def forgetful(self: TablePart, worker: int, number: int) -> None:
        end(self, worker, number)
        self._header[_AT] = 1
        self._header[_WORD] += 1

    patch(TablePart, "_end", forgetful)


def lock_ignored(patch: Patch) -> None:
    """Whoever wants to write writes."""
    patch(Mutex, "held", lambda self, timeout_s=30.0: nullcontext())


def lock_outlives_its_holder(patch: Patch) -> None:
    """Nobody takes a lock that somebody holds, or died holding."""
    _in_python(patch)
    held = Mutex.held

    def held_by_nobody_before(self: Mutex, timeout_s: float) -> AbstractContextManager[None]:
        waiting = Waiting(timeout_s)
        while self.owner:
            if waiting.over():
                raise self.late(timeout_s)
            waiting.rest()
        return held(self, timeout_s)

    patch(Mutex, "held", held_by_nobody_before)


def ack_before_effect(patch: Patch) -> None:
    """An add returns before it is taken, which the next one does."""
    take = Table._take
    put_off: list[Any] = []

    def later(self: Table, *taken: Any) -> None:
        put_off.append((self, *taken))
        if len(put_off) > 1:
            take(*put_off.pop(0))

    patch(Table, "_take", later)


def half_row_visible(patch: Patch) -> None:
    """A reader does not look whether somebody writes."""

    def read(self: TablePart, rows: Any, out: Any, timeout_s: float) -> None:
        out.copy_(self.parts[0] if rows is None else self.parts[0][rows])

    patch(TablePart, "read", read)


def snapshot_torn(patch: Patch) -> None:
    """A snapshot is taken without the lock."""

    def copy_all(self: TablePart, timeout_s: float) -> Any:
        return [each.clone() for each in self.parts]

    patch(TablePart, "copy_all", copy_all)


def clock_not_advanced(patch: Patch) -> None:
    """A worker that ends its round does not say so."""
    patch(Membership, "advance_to", lambda self, worker, clock, number: None)


def dead_still_counted(patch: Patch) -> None:
    """Nobody looks whether a worker lives."""
    patch(Membership, "_mark_dead", lambda self: None)


def round_taken_twice(patch: Patch) -> None:
    """Who goes on with the round of somebody who died begins at its first add."""
    add = TablePart._add_in_python

    def add_again(self: TablePart, entry: Entry, timeout_s: float) -> None:
        add(self, entry._replace(number=0), timeout_s)

    patch(TablePart, "add", add_again)


def key_before_its_add(patch: Patch) -> None:
    """A key counts as soon as it is written down."""
    bring = KeyPart._bring

    def at_once(self: KeyPart, new: Any) -> None:
        bring(self, new)
        self._commit()

    patch(KeyPart, "_bring", at_once)


def key_without_its_add(patch: Patch) -> None:
    """The keys of an add that was put back count when the next one ends."""
    bring = KeyPart._bring

    def behind_others(self: KeyPart, new: Any) -> None:
        counts = self._counts
        counts[keys._STOP] = max(counts[keys._STOP], counts[keys._NEXT_STOP])
        bring(self, new)

    patch(KeyPart, "_bring", behind_others)


def index_not_followed(patch: Patch) -> None:
    """A process takes note of new keys, and does not find them."""
    patch(keys._KeyIndex, "follow", lambda self, stop: setattr(self._view, "stop", stop))


BUGS: dict[str, Callable[[Patch], None]] = {
    bug.__name__: bug
    for bug in (
        undo_not_applied,
        undo_applied_twice,
        lock_ignored,
        lock_outlives_its_holder,
        ack_before_effect,
        half_row_visible,
        snapshot_torn,
        clock_not_advanced,
        dead_still_counted,
        round_taken_twice,
        key_before_its_add,
        key_without_its_add,
        index_not_followed,
    )
}


def plant(name: str | None, patch: Patch = setattr) -> None:
    """Break this process: for good, or until what ``patch`` has changed is put back."""
    if name is not None:
        BUGS[name](patch)
