"""The memory of a keys table: rows that are found by key, and come as keys come.

    region of a shard   | counts | record | keys | values | states |

A key's *place* is its row's number in the shard. Places are given out in order, and no row moves.
The region is as long as a shard may ever become, and its memory is taken as keys come. A process
finds a key's place in an index of its own (native/keys.c), which follows the list of keys.

# Note [A key comes with its add]
    counts   BASE | STOP | NEXT_BASE | NEXT_STOP | RESERVED

The keys that are there are those of the places from BASE's to STOP. New keys are written down
behind them, with their first rows; NEXT_STOP says how many there are. Then comes the add (part.py).
Its end makes STOP = NEXT_STOP, so readers see the keys when they see the add; if it is put back,
nobody has seen them. A restore writes its rows to free places, and its end moves BASE as well:
the first place in use, and above it (32 bits) how often there was a restore.

# Note [Room]
Memory up to RESERVED is there. An add to several shards must not run out of it at the third, after
two have taken their part. So it first claims, on its worker's line of the table's page, room for as
many keys as it may bring to one shard, and has each shard make room for all claims. The claim is
made and ended with the log's lock held; whoever finishes a dead worker's log ends it, too.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import OutOfSpace
from phalanx.ipc import Mutex, Region, Waiting, aligned, check_room, fail_point
from phalanx.native import FUNCTIONS, IndexView, KeysView, address_of
from phalanx.tables.log import WorkerLog
from phalanx.tables.own_parts import OwnParts
from phalanx.tables.part import BEHIND, DONE, UNSETTLED, Entry, RecordMemory, TablePart
from phalanx.tables.row_initializer import RowInit, RowInitializer
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec, most_rows
from phalanx.tables.table_page import SEED, TablePage
from phalanx.tables.updaters import state_dtype

__all__ = ["MAX_KEYS", "POINTS", "KeyPart", "OwnKeys"]

POINTS = ("room made", "keys written", "keys pending")
"""Fail points of an add of new keys, in order; those of a `TablePart` follow."""

MAX_KEYS = 1 << 30  # of a shard: an index has places in 32 bits
_MOST_BYTES = 1 << 39  # of a table: addresses that are kept for it, not memory
_BASE, _STOP, _NEXT_BASE, _NEXT_STOP, _RESERVED = range(5)
_FIRST_BITS = 32
_HEAD_BYTES = 128
_PAGE = 4096
_LEAST_ROOM = 1 << 16  # bytes
_ATTEMPTS = 3


def _on_page(at: int) -> int:
    return -(-at // _PAGE) * _PAGE


@dataclass(frozen=True)
class _KeysLayout:
    """Offsets in the region of a shard, in bytes.

    Attributes:
        dtypes: Of the keys, the values and each state.
        widths: How many numbers each of these has in a row.
        starts: Where each of these begins.
        records: Where the record of the values and of each state begins.
        record_rows: Where the numbers of the rows in the record begin.
        record_size: How many rows the record holds.
        head_bytes: The counts and the record.
        most_keys: How many rows there can be.
        nbytes: The size of the region.
    """

    dtypes: list[torch.dtype]
    widths: list[int]
    starts: list[int]
    records: list[int]
    record_rows: int
    record_size: int
    head_bytes: int
    most_keys: int
    nbytes: int

    @classmethod
    def of(cls, spec: TableSpec) -> _KeysLayout:
        kinds = spec.updater.states
        dtypes = [torch.int64, spec.dtype, *(state_dtype(spec.dtype) for _ in kinds)]
        widths = [1, spec.cols, *(spec.cols if kind == "element" else 1 for kind in kinds)]
        row_bytes = [d.itemsize * width for d, width in zip(dtypes, widths, strict=True)]
        record_size = min(most_rows(spec.cols), max(_PAGE, _first_room(spec)))
        at, records = _HEAD_BYTES, []
        for nbytes in row_bytes[1:]:
            records.append(at)
            at = aligned(at + nbytes * record_size)
        record_rows, at = at, _on_page(at + 8 * record_size)
        head_bytes, starts = at, []
        fitting = _MOST_BYTES // spec.num_shards // sum(row_bytes)
        most_keys = min(MAX_KEYS, max(fitting, _first_room(spec)))
        for nbytes in row_bytes:
            starts.append(at)
            at = _on_page(at + nbytes * most_keys)
        return cls(
            dtypes,
            widths,
            starts,
            records,
            record_rows,
            record_size,
            head_bytes,
            most_keys,
            nbytes=at,
        )

    @property
    def row_bytes(self) -> list[int]:
        """How many bytes a row has of each part."""
        return [d.itemsize * width for d, width in zip(self.dtypes, self.widths, strict=True)]


def _first_room(spec: TableSpec) -> int:
    """Return for how many keys a shard has room at first."""
    return -(-spec.capacity // spec.num_shards)


def _reserve_rows(region: Region, layout: _KeysLayout, start: int, stop: int) -> None:
    check_room(sum(layout.row_bytes) * (stop - start), region.label)
    for begin, row_bytes in zip(layout.starts, layout.row_bytes, strict=True):
        region.reserve_part(begin + start * row_bytes, (stop - start) * row_bytes)


class _KeyIndex:
    """Where each key lies, as one process knows it; of one BASE.

    Args:
        keys: The list of keys, shared.
        base: The word BASE.
        room: For how many keys there is room.
    """

    def __init__(self, keys: Tensor, base: int, room: int) -> None:
        size = 1 << max(6, (4 * room - 1).bit_length())
        self.base = base
        self.room = size // 2  # so that a search ends after a few steps
        self._entries = np.zeros(size, dtype=np.int32)
        first = base & ((1 << _FIRST_BITS) - 1)
        # A seed of its own, so that nobody can send keys that all hash to one entry.
        self._view = IndexView(
            self._entries.ctypes.data, keys.data_ptr(), size - 1, secrets.randbits(63), base, first
        )
        self.at = self._view.address

    def follow(self, stop: int) -> None:
        """Take in keys up to place ``stop``; one thread at a time does so."""
        FUNCTIONS["index_insert"](self.at, stop)

    def find(self, keys: Tensor, stop: int, places: Tensor) -> int:
        """Write each key's place below ``stop``, or -1, and return how many are not there."""
        at, count = keys.data_ptr(), keys.numel()
        return int(FUNCTIONS["index_find"](self.at, at, count, stop, places.data_ptr()))


class KeyPart(TablePart):
    """A shard, as one process sees it. Rows of entries, and rows to read, are keys.

    Args:
        spec: The table.
        region: The shard's memory.
        lock: Held to change anything.
        header: The words of a `TablePart`.
        done: For each worker the number of its last add that is in.
        row_initializer: What a row holds at first.
        claimed: Returns for how many keys others than a worker have claimed room.
        logged: Returns what of a logged add is this shard's, by worker and number.
    """

    def __init__(
        self,
        spec: TableSpec,
        region: Region,
        *,
        lock: Mutex,
        header: memoryview,
        done: memoryview,
        row_initializer: RowInitializer,
        claimed: Callable[[int], int],
        logged: Callable[[int, int], Entry],
    ) -> None:
        layout = _KeysLayout.of(spec)

        def view(dtype: torch.dtype, width: int, start: int, num_rows: int) -> Tensor:
            return region.tensor(dtype, num_rows * width, start).view(num_rows, width)

        kinds = list(zip(layout.dtypes, layout.widths, strict=True))
        keys, *parts = (
            view(*kind, start, layout.most_keys)
            for kind, start in zip(kinds, layout.starts, strict=True)
        )
        records = [
            view(*kind, start, layout.record_size)
            for kind, start in zip(kinds[1:], layout.records, strict=True)
        ]
        record_rows = region.tensor(torch.int64, layout.record_size, layout.record_rows)
        super().__init__(
            lock=lock,
            header=header,
            done=done,
            parts=parts,
            record=RecordMemory(records, record_rows),
            spec=spec,
            first_row=0,
            logged=logged,
        )
        self._region = region
        self._layout = layout
        self._keys = keys.view(-1)
        self._counts = region.buffer[:_HEAD_BYTES].cast("q")
        self._row_initializer = row_initializer
        self._claimed = claimed
        self._following = threading.Lock()
        self._known = _KeyIndex(self._keys, self._counts[_BASE], 0)
        self._keys_view = KeysView(self._at, address_of(self._counts), row_initializer.row_at)
        self._keys_at = self._keys_view.address
        self._get_keys_in_c, self._add_keys_in_c = FUNCTIONS["keys_get"], FUNCTIONS["keys_add"]

    @property
    def num_bytes(self) -> int:
        """How much memory the shard takes."""
        return self._layout.head_bytes + sum(self._layout.row_bytes) * self._counts[_RESERVED]

    def _first(self) -> int:
        return self._counts[_BASE] & ((1 << _FIRST_BITS) - 1)

    # --- looking keys up --------------------------------------------------------------------------

    def _follow(self, *, settled: bool = False) -> _KeyIndex:
        """Return an index of the keys that are there now, if the words can be read together.

        They can where ``settled``: then the lock is held.
        """
        counts, header = self._counts, self._header
        with self._following:
            word, base, stop = header[0], counts[_BASE], counts[_STOP]
            if settled or (not word & 1 and header[0] == word):
                num_keys, known = stop - (base & ((1 << _FIRST_BITS) - 1)), self._known
                if known.base != base or known.room < num_keys:
                    known = _KeyIndex(self._keys, base, num_keys)
                known.follow(stop)
                self._known = known  # readers that have the other one keep it
            return self._known

    def read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        """Copy the rows of keys into ``out``; never half of an add."""
        assert rows is not None
        for _ in range(_ATTEMPTS):
            answer = self._read_with(self._known, rows, out)
            if answer == DONE:
                return
            if answer == BEHIND:
                self._follow()

        def read_settled() -> None:
            self._read_with(self._follow(settled=True), rows, out)

        self._call_settled(read_settled, timeout_s)

    def _read_with(self, index: _KeyIndex, keys: Tensor, out: Tensor) -> int:
        to, at, count = out.data_ptr(), keys.data_ptr(), keys.numel()
        if self._row_initializer.is_constant():
            answer: int = self._get_keys_in_c(self._keys_at, index.at, at, count, to, None)
            return answer
        places = torch.empty_like(keys)
        answer = self._get_keys_in_c(self._keys_at, index.at, at, count, to, places.data_ptr())
        absent = places < 0
        if answer == DONE and bool(absent.any()):
            out[absent] = self._row_initializer.rows_for(keys[absent].numpy())
        return answer

    def num_keys(self, timeout_s: float) -> int:
        """Return how many keys are there."""
        return self._call_settled(lambda: self._counts[_STOP] - self._first(), timeout_s)

    def keys(self, timeout_s: float) -> Tensor:
        """Return a copy of the keys, of one moment."""
        return self._call_settled(lambda: self._keys[self._used()].clone(), timeout_s)

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the keys, their values and their states, of one moment."""

        def copy() -> list[Tensor]:
            used = self._used()
            return [part[used].clone() for part in (self._keys, *self.parts)]

        return self._call_settled(copy, timeout_s)

    def _used(self) -> slice:
        return slice(self._first(), self._counts[_STOP])

    # --- room -------------------------------------------------------------------------------------

    def num_new(self, keys: Tensor) -> int:
        """Return how many of the keys are not there, each counted once."""
        places, index = torch.empty_like(keys), self._follow()
        index.find(keys, self._counts[_STOP], places)
        return len(keys[places < 0].unique())

    def make_room(self, num_keys: int, timeout_s: float) -> None:
        """Have room for so many new keys.

        Raises:
            OutOfSpace: There is no memory for them.
        """
        self._call_settled(lambda: self._reserve(self._counts[_STOP] + num_keys), timeout_s)

    def _reserve(self, stop: int) -> None:
        """Have memory for the rows of places up to ``stop``. The lock is held."""
        counts = self._counts
        start = max(counts[_STOP], counts[_RESERVED])
        if stop <= start:
            return
        spare = max((start - self._first()) // 4, _LEAST_ROOM // sum(self._layout.row_bytes))
        with suppress(OutOfSpace):
            self._take_memory(start, min(max(stop, start + spare), self._layout.most_keys))
        if counts[_RESERVED] < stop:
            self._take_memory(start, stop)

    def _take_memory(self, start: int, stop: int) -> None:
        layout = self._layout
        if stop > layout.most_keys:
            raise OutOfSpace(
                f"A shard of table {self._spec.name!r} must have at most {layout.most_keys} keys, "
                f"but {stop} are to come. Make the table with more `num_shards`.",
                None,
                None,
            )
        _reserve_rows(self._region, layout, start, stop)
        fail_point("room made")
        self._counts[_RESERVED] = stop

    # --- changing: the lock is held ---------------------------------------------------------------

    def _add_once(self, entry: Entry, wait_ms: int) -> int:
        rows, delta, worker, _, _, number, _, unchecked = entry
        assert rows is not None
        at, count, source = rows.data_ptr(), rows.numel(), delta.data_ptr()
        index = self._known
        for _ in range(_ATTEMPTS):
            answer: int = self._add_keys_in_c(
                self._keys_at, index.at, at, count, source, unchecked, worker, number, wait_ms
            )
            if answer != BEHIND:
                return answer
            index = self._follow()
        return UNSETTLED  # so that somebody waits

    def _refuse_outside(self, rows: Tensor | None) -> None:
        """Do nothing: any number is a key."""

    def _prepared(self, entry: Entry) -> Entry:
        assert entry.rows is not None
        places = self._places_of(entry.rows.clone(), entry.worker)  # others may change the rows
        return super()._prepared(entry._replace(rows=places))

    def _places_of(self, keys: Tensor, worker: int) -> Tensor:
        """Return the places of keys; bring those that are not there."""
        places, counts = torch.empty_like(keys), self._counts
        stop, is_begun = counts[_STOP], self._header[0] & 1
        self._follow(settled=True).find(keys, stop, places)
        absent = places < 0
        new, which = torch.unique(keys[absent], return_inverse=True)
        if not is_begun:  # else they have been brought, in the same order
            self._bring(new, worker)
        places[absent] = stop + which
        return places

    def _bring(self, keys: Tensor, worker: int) -> None:
        counts = self._counts
        first = counts[_STOP]
        after = first + len(keys)
        if len(keys):
            self._reserve(after + self._claimed(worker))
            values, *states = self.parts
            values[first:after] = self._row_initializer.rows_for(keys.numpy())
            for state, number in zip(states, self._updater.first_states(), strict=True):
                state[first:after] = number
            self._keys[first:after] = keys
            fail_point("keys written")
        counts[_NEXT_BASE], counts[_NEXT_STOP] = counts[_BASE], after
        if len(keys):
            fail_point("keys pending")

    def _commit(self) -> None:
        counts = self._counts
        counts[_BASE], counts[_STOP] = counts[_NEXT_BASE], counts[_NEXT_STOP]

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by these keys, each once, and their values and states."""
        self._call_settled(lambda: self._replace(parts), timeout_s)

    def _replace(self, parts: list[Tensor]) -> None:
        counts, used = self._counts, self._used()
        count = len(parts[0])
        start = 0 if count <= used.start else used.stop
        self._take_memory(start, start + count)
        for own, given in zip((self._keys, *self.parts), parts, strict=False):
            own[start : start + count] = given
        fail_point("keys written")
        number = (counts[_BASE] >> _FIRST_BITS) + 1
        counts[_NEXT_BASE] = number << _FIRST_BITS | start
        counts[_NEXT_STOP] = start + count
        fail_point("keys pending")
        self._change_nothing()
        for begin, row_bytes in zip(self._layout.starts, self._layout.row_bytes, strict=True):
            used_bytes = (used.stop - used.start) * row_bytes
            self._region.release_part(begin + used.start * row_bytes, used_bytes)


class OwnKeys(OwnParts):
    """This host's parts of a keys table."""

    parts: list[KeyPart]

    def __init__(self, *args: Any, **options: Any) -> None:  # Any: as `OwnParts` takes them
        super().__init__(*args, **options)
        spec = self.spec
        self._first = RowInitializer(spec, self.region, _page_bytes(spec))
        self.parts = [
            KeyPart(
                spec,
                _open_shard(spec, self._regions, index),
                lock=self._lock_of(index),
                header=self.page.shard(index),
                done=self.page.done(index),
                row_initializer=self._first,
                claimed=self.page.claimed_by_others,
                logged=self._logged_for(index),
            )
            for index in range(spec.num_shards)
        ]

    @staticmethod
    def page_bytes(spec: TableSpec) -> int:
        """Return the size of the region that has the table's page."""
        return _page_bytes(spec) + RowInitializer.needed_bytes(spec)

    @classmethod
    def take_memory(cls, spec: TableSpec, regions: RunRegions) -> None:
        """Make the regions of a new table."""
        super().take_memory(spec, regions)
        layout, room = _KeysLayout.of(spec), _first_room(spec)
        for index in range(spec.num_shards):
            region = _open_shard(spec, regions, index)
            _reserve_rows(region, layout, 0, room)
            region.buffer[:_HEAD_BYTES].cast("q")[_RESERVED] = room

    @property
    def nbytes(self) -> int:
        """How much memory the parts take now, logs apart."""
        return self.region.nbytes + sum(part.num_bytes for part in self.parts)

    def _begin(self, init: RowInit) -> None:
        self.page.table[SEED] = secrets.randbits(63)
        self._first.write(init)

    def _make_room(self, log: WorkerLog, entries: list[Entry], waiting: Waiting) -> None:
        """Have room for new keys in every part, before the first takes its share."""
        if len(self.parts) == 1:  # which makes room before it begins
            return
        bringing = []
        for entry in entries:
            for part, share in self._shares(entry):
                assert isinstance(part, KeyPart)
                assert share.rows is not None
                num_new = part.num_new(share.rows)
                if num_new:
                    bringing.append((num_new, part))
        if bringing:
            log.claim(max(num_new for num_new, _ in bringing))
            claimed = self.page.num_claimed()
            for _, part in bringing:
                part.make_room(claimed, waiting.remaining_s())


def _page_bytes(spec: TableSpec) -> int:
    return aligned(TablePage.needed_bytes(spec.num_shards))


def _open_shard(spec: TableSpec, regions: RunRegions, index: int) -> Region:
    layout = _KeysLayout.of(spec)
    name = f"keys-{index}-{spec.name}"
    return regions.open_region(name, layout.nbytes, reserved=layout.head_bytes)
