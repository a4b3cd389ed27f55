"""Bugs that are planted in parameter tables, to see that somebody notices.

Each is a function that breaks this process's tables, by name in :data:`BUGS`; a child is given the
name. The real code is never far: what a bug leaves out, or does twice, stands in its docstring.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from phalanx.errors import PeerTimeout
from phalanx.ipc import Mutex, Waiting
from phalanx.tables import hash_segment, key_shard, part
from phalanx.tables.hash_index import HashIndex
from phalanx.tables.hash_segment import HashSegment
from phalanx.tables.key_storage import CapacityClaims, KeyStorage
from phalanx.tables.membership import Membership
from phalanx.tables.part import TablePart
from phalanx.tables.sharded import Sharded
from phalanx.tables.table import Table

Patch = Callable[[Any, str, Any], None]  # as `setattr`, or pytest's

_WORD, _AT = part._WORD, part._AT


def _in_python(patch: Patch) -> None:
    """Have every add made by Python code, where bugs can be planted."""

    def add(self: TablePart, entry: Any, timeout_s: float) -> None:
        self.change(part.checked(entry), timeout_s, logged=False)

    patch(TablePart, "add", add)


def undo_not_applied(patch: Patch) -> None:
    """Who finds an add half done leaves its rows as they are."""
    patch(TablePart, "_put_back", lambda self: None)


def undo_applied_twice(patch: Patch) -> None:
    """An add that has ended still counts as begun, so the next one undoes it again."""
    _in_python(patch)
    end = TablePart._end

    def forgetful(self: TablePart, entry: Any) -> None:
        end(self, entry)
        self._header[_AT] |= 1
        self._header[_WORD] += 1

    patch(TablePart, "_end", forgetful)


def lock_ignored(patch: Patch) -> None:
    """Whoever wants to write writes."""
    patch(Mutex, "held", lambda self, timeout_s=30.0: nullcontext())


def lock_outlives_its_holder(patch: Patch) -> None:
    """The lock is a file, which a death leaves where it is."""
    _in_python(patch)

    def path_of(lock: Mutex) -> Path:
        name = lock.label.replace(" ", "-")  # the same for all who share it
        return Path(tempfile.gettempdir()) / f"phalanx-bug-{name}"

    def acquire(lock: Mutex, timeout_s: float) -> None:
        waiting = Waiting(timeout_s)
        while True:
            try:
                os.close(os.open(path_of(lock), os.O_CREAT | os.O_EXCL))
                return
            except FileExistsError:
                if waiting.over():
                    raise PeerTimeout(f"Lock {lock.label!r} must become free.") from None
                waiting.rest()

    @contextmanager
    def held(self: Mutex, timeout_s: float = 30.0) -> Iterator[None]:
        if self.label.startswith("shard"):
            acquire(self, timeout_s)
        try:
            yield
        finally:
            path_of(self).unlink(missing_ok=True)

    patch(Mutex, "held", held)


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
        self._copy(rows, out)

    patch(TablePart, "read", read)


def snapshot_torn(patch: Patch) -> None:
    """A snapshot is taken without the lock."""

    def copy_all(self: TablePart, timeout_s: float) -> Any:
        return [each.clone() for each in self.parts]

    patch(TablePart, "copy_all", copy_all)


def clock_not_advanced(patch: Patch) -> None:
    """A worker that ends its round does not say so."""
    patch(Membership, "advance", lambda self, worker: self.clock(worker))


def dead_still_counted(patch: Patch) -> None:
    """Nobody looks whether a worker lives."""
    patch(Membership, "_mark_dead", lambda self: None)


def round_taken_twice(patch: Patch) -> None:
    """Who goes on with the round of somebody who died begins at its first add."""
    patch(TablePart, "has", lambda self, worker, number: False)


def key_before_its_add(patch: Patch) -> None:
    """A key counts as soon as it is written down."""
    bring = HashSegment._bring

    def at_once(self: HashSegment, keys: Any) -> None:
        bring(self, keys)
        self._counts[hash_segment._FOR] = hash_segment._NONE

    patch(HashSegment, "_bring", at_once)


def key_entries_stay(patch: Patch) -> None:
    """The index keeps the keys of an add that did not end."""
    patch(HashIndex, "drop", lambda self, first_slot: None)


def growth_before_its_rows(patch: Patch) -> None:
    """A new segment counts before the rows are in it."""
    take_over = HashSegment.take_over

    def too_early(self: HashSegment, older: Any, keys: Any, parts: Any) -> None:
        self.make_header()
        line = self._newest.__self__._line  # type: ignore[attr-defined]
        exponent = self.capacity.bit_length() - 1
        line[key_shard._NEWEST] = self.serial * key_shard._SERIAL + exponent
        take_over(self, older, keys, parts)

    patch(HashSegment, "take_over", too_early)


def growth_not_noticed(patch: Patch) -> None:
    """A process keeps using the segment it has open."""
    settle = HashSegment._settle

    def as_if_newest(self: HashSegment) -> int:
        patch(self, "_newest", lambda: self.serial)
        return settle(self)

    newest = key_shard.KeyShard.newest
    patch(HashSegment, "_settle", as_if_newest)
    patch(key_shard.KeyShard, "newest", lambda self: self._known or newest(self))


def room_not_made(patch: Patch) -> None:
    """An add to several shards looks for room where it has come to."""
    patch(KeyStorage, "_room_for", Sharded._room_for)


def room_given_away(patch: Patch) -> None:
    """Each add counts its own keys alone where it looks for room."""
    original = CapacityClaims.claim
    own: list[int] = []

    def claim(self: CapacityClaims, worker: int, num_keys: int) -> Any:
        own.append(num_keys)
        return original(self, worker, num_keys)

    patch(CapacityClaims, "claim", claim)
    patch(CapacityClaims, "total", lambda self: own[-1])


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
        key_entries_stay,
        growth_before_its_rows,
        growth_not_noticed,
        room_not_made,
        room_given_away,
    )
}


def plant_in_child(name: str | None) -> None:
    """Break this process, which will not be needed for anything else."""
    if name is not None:
        BUGS[name](setattr)
