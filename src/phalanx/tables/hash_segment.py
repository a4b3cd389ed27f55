"""The rows of one shard of a keys table, as long as they fit: one region that does not grow.

    region   | page | rows, record as in spec.py | entries | keys |
    page     line 0   BASE | NEXT | FOR          line 1   the header of a `TablePart`

It is a shard whose rows are found by key. Slots are given out in order and never taken back, so a
key's slot is its own for good, in the segments that follow too.

# Note [A key comes with its add]
The keys that are there are those of the first N slots, and N has to change together with the rows:
by the one store that ends an add (see part.py).

    N = BASE  while WORD is FOR or FOR + 1    an add comes, or is under way, that brings keys
    N = NEXT  otherwise                       for WORD is FOR + 2 as soon as that add has ended

So new keys are written down first: their rows in slots that do not count yet, their entries in the
index, where a search passes over slots from N on; then comes the add. If it does not begin, or is
put back, the next holder of the lock makes NEXT = BASE and drops the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.ipc import Mutex, Region, aligned, fail_point
from phalanx.tables.hash_index import ENTRIES_PER_KEY, HashIndex, Int64s
from phalanx.tables.part import Entry, RecordMemory, TablePart, checked
from phalanx.tables.row_initializer import RowInitializer
from phalanx.tables.spec import TableLayout, TableSpec, view_parts, view_record

__all__ = ["POINTS", "HashSegment", "SegmentFull", "StaleSegment", "segment_bytes"]

POINTS = ("keys written", "keys indexed", "keys pending")
"""Fail points of an add of new keys, in order; those of a `TablePart` follow."""

Absent = NDArray[np.bool_] | None

_BASE, _NEXT, _FOR = range(3)
_NONE = -2  # no word that is one of two that follow each other
_WORD = 0  # of the header (part.py)
_ATTEMPTS = 3
_PAGE_BYTES = 128


class SegmentFull(Exception):
    """There are more keys than the segment holds."""

    def __init__(self, num_keys: int) -> None:
        super().__init__(num_keys)
        self.num_keys = num_keys


class StaleSegment(Exception):
    """The shard has grown into another segment."""


def _laid_out(spec: TableSpec, capacity: int) -> tuple[TableSpec, TableLayout]:
    sized = replace(spec, rows=capacity, num_shards=1)
    return sized, TableLayout.of(sized, _PAGE_BYTES)


def _absent_ones(keys: Int64s, slots: Int64s) -> Int64s:
    """Return the keys that are not there, each once."""
    absent = slots < 0
    return np.unique(keys[absent]) if absent.any() else keys[:0]


def _index_offsets(spec: TableSpec, capacity: int) -> tuple[int, int, int]:
    entries = aligned(_laid_out(spec, capacity)[1].nbytes)
    keys = entries + 4 * ENTRIES_PER_KEY * capacity
    return entries, keys, keys + 8 * capacity


def segment_bytes(spec: TableSpec, capacity: int) -> int:
    """Return the size of the region for ``capacity`` keys."""
    return _index_offsets(spec, capacity)[-1]


class HashSegment(TablePart):
    """One segment, as one process sees it. Rows of entries, and rows to read, are keys.

    Args:
        spec: The table.
        serial: The segment's number.
        capacity: How many keys it holds, a power of two from 16 on.
        region: Its memory, of :func:`segment_bytes`.
        lock: The shard's, the same for all its segments.
        row_initializer: What a row holds at first.
        newest: Tells the number of the newest segment.
        seed: Of the index.
        done: For each worker the number of its last add that is in.
        logged: Returns what of a logged add is this shard's, by worker and number.
    """

    def __init__(
        self,
        spec: TableSpec,
        serial: int,
        capacity: int,
        region: Region,
        lock: Mutex,
        row_initializer: RowInitializer,
        newest: Callable[[], int],
        seed: int,
        done: memoryview,
        logged: Callable[[int, int], Entry],
    ) -> None:
        sized, layout = _laid_out(spec, capacity)
        page = region.buffer[:_PAGE_BYTES].cast("q")
        super().__init__(
            lock=lock,
            header=page[8:],
            done=done,
            parts=view_parts(region, sized, layout),
            record=RecordMemory(*view_record(region, sized, layout, 0)),
            updater=spec.updater,
            first_row=0,
            logged=logged,
        )
        self.serial = serial
        self.capacity = capacity
        self.nbytes = region.nbytes
        self._counts = page[:8]
        self._row_initializer = row_initializer
        self._newest = newest
        entries, keys, _ = _index_offsets(spec, capacity)
        self._keys = region.tensor(torch.int64, capacity, keys)
        self._index = HashIndex(
            region.tensor(torch.int32, ENTRIES_PER_KEY * capacity, entries).numpy(),
            self._keys.numpy(),
            seed,
        )

    # --- beginning --------------------------------------------------------------------------------

    def make_header(self) -> None:
        """Make the header of a new table."""
        self._counts[_FOR] = _NONE

    def take_over(self, older: HashSegment, keys: Tensor, parts: Sequence[Tensor]) -> None:
        """Go on for another segment, settled and locked, with these keys and their rows."""
        self.make_header()
        self._header[:] = older._header
        num_keys = len(keys)
        for target, part in zip(self.parts, parts, strict=True):
            target[:num_keys] = part
        fail_point("half the keys copied")
        self._index.insert(keys.numpy(), 0)
        self._counts[_NEXT] = num_keys

    def grow_from(self, older: HashSegment) -> None:
        """Go on for a smaller segment, settled and locked."""
        keys, *parts = older.view_all()
        self.take_over(older, keys, parts)

    # --- reading ----------------------------------------------------------------------------------

    def num_keys(self) -> int:
        """Return how many keys are there."""
        counts = self._counts
        while True:  # until nothing has changed meanwhile
            coming = counts[_NEXT]
            pending = counts[_FOR]
            num_keys = counts[_BASE] if self._is_pending(pending) else coming
            if counts[_NEXT] == coming and counts[_FOR] == pending:
                return num_keys

    def read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        assert rows is not None
        keys = rows.numpy()
        for _ in range(_ATTEMPTS):
            num_keys = self.num_keys()
            slots, absent = self._look_up(keys, num_keys)
            super().read(torch.from_numpy(slots), out, timeout_s)
            if absent is None:
                return
            # Else an add has brought some of them, and may have changed other rows before the read.
            if self.num_keys() == num_keys:
                self._fill_in(out, keys, absent)
                return
        self._call_settled(lambda: self._copy_out(keys, out), timeout_s)

    def _copy_out(self, keys: Int64s, out: Tensor) -> None:
        slots, absent = self._look_up(keys, self.num_keys())
        self._rows[0].take(torch.from_numpy(slots), out)
        if absent is not None:
            self._fill_in(out, keys, absent)

    def _look_up(self, keys: Int64s, num_keys: int) -> tuple[Int64s, Absent]:
        """Return slots, 0 for absent keys, and a mask of the absent ones, if any."""
        slots = self._index.find(keys)
        absent = (slots < 0) | (slots >= num_keys)
        if not absent.any():
            return slots, None
        slots[absent] = 0
        return slots, absent

    def _fill_in(self, out: Tensor, keys: Int64s, absent: NDArray[np.bool_]) -> None:
        out[torch.from_numpy(absent)] = self._row_initializer.rows_for(keys[absent])

    def view_all(self) -> list[Tensor]:
        """Return the keys, their values and their states, where they lie; the lock is held."""
        num_keys = self.num_keys()
        return [self._keys[:num_keys], *(part[:num_keys] for part in self.parts)]

    def copy_keys(self) -> Tensor:
        """Return a copy of the keys, of one moment."""
        # Slots are not taken back, and not counted before they are written.
        return self._keys[: self.num_keys()].clone()

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the keys, their values and their states, of one moment."""
        return self._call_settled(lambda: [part.clone() for part in self.view_all()], timeout_s)

    def num_new(self, keys: Int64s) -> int:
        """Return how many of the keys are not there, each counted once."""
        num_keys = self.num_keys()  # first: a slot that counts by then is its key's for good
        slots = self._index.find(keys)
        slots[slots >= num_keys] = -1
        return len(_absent_ones(keys, slots))

    def require_room(self, num_new: Callable[[], int], timeout_s: float) -> None:
        """Look whether there is room for more keys.

        Raises:
            SegmentFull: There is not.
        """

        def require() -> None:
            after = self.num_keys() + num_new()
            if after > self.capacity:
                raise SegmentFull(after)

        self._call_settled(require, timeout_s)

    # --- changing: the lock is held ---------------------------------------------------------------

    def settle(self) -> None:
        """Undo the unfinished add of a dead process."""
        self._settle()

    def _settle(self) -> None:
        if self._newest() != self.serial:
            raise StaleSegment
        if not self._header[_WORD] & 1:
            self._drop_unfinished()
        super()._settle()

    def _drop_unfinished(self) -> None:
        """Take back the keys of an add that has not ended, while WORD still says so."""
        counts = self._counts
        if self._is_pending(counts[_FOR]):
            counts[_NEXT] = counts[_BASE]
            self._index.drop(counts[_BASE])
            counts[_FOR] = _NONE

    def _is_pending(self, word: int) -> bool:
        """Tell whether the add has not ended that was to begin at ``word``."""
        return self._header[_WORD] in (word, word + 1)

    def add(self, entry: Entry, timeout_s: float) -> None:
        self.change(checked(entry), timeout_s, logged=False)

    def _prepared(self, entry: Entry) -> Entry:
        assert entry.rows is not None
        slots = torch.from_numpy(self._slots_for(entry.rows.numpy()))
        return super()._prepared(entry._replace(rows=slots))

    def _slots_for(self, keys: Int64s) -> Int64s:
        """Return the slots of keys; absent ones get a slot, for the add that comes."""
        slots = self._index.find(keys)
        new_keys = _absent_ones(keys, slots)
        if len(new_keys):
            self._bring(new_keys)
            absent = slots < 0
            slots[absent] = self._index.find(keys[absent])
        return slots

    def _bring(self, keys: Int64s) -> None:
        counts = self._counts
        first = self.num_keys()
        after = first + len(keys)
        if after > self.capacity:
            raise SegmentFull(after)
        values, *states = self.parts
        values[first:after] = self._row_initializer.rows_for(keys)
        for state, number in zip(states, self._updater.first_states(), strict=True):
            state[first:after] = number
        fail_point("keys written")
        counts[_BASE] = first
        counts[_FOR] = self._header[_WORD]
        self._index.insert(keys, first)
        fail_point("keys indexed")
        counts[_NEXT] = after
        fail_point("keys pending")
