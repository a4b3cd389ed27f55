"""The memory of a keys table: rows that are found by key, and come as keys come.

A key's *place* is its row's number (table_memory.py). Places are given out in order, and no row
moves; memory is taken as keys come. A process finds a key's place in an index of its own
(native/keys.c), which follows the list of keys.

# Note [A key comes with its add]
    counts   GENERATION | STOP | NEXT_STOP | RESERVED

The keys that are there are those of the places before STOP. New keys are written down behind them,
with their first rows; NEXT_STOP says how many there are. Then comes the add (part.py). Its end
makes STOP = NEXT_STOP, so readers see the keys when they see the add; if it is put back, no reader
has seen them. A restore writes other keys to the places; GENERATION counts restores.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import OutOfSpace
from phalanx.ipc import fail_point
from phalanx.native import FUNCTIONS, IndexView, KeysView, address_of
from phalanx.tables.part import BEHIND, DONE, UNSETTLED, Entry, TablePart
from phalanx.tables.table_memory import RESERVED, TableMemory

_GENERATION, _STOP, _NEXT_STOP = range(3)
_LEAST_ROOM = 1 << 16  # bytes
_ATTEMPTS = 3


class _KeyIndex:
    """The places of keys as one process knows them; of one generation.

    Args:
        keys: The list of keys, shared.
        generation: The word GENERATION.
        room: For how many keys there is room.
    """

    def __init__(self, keys: Tensor, generation: int, room: int) -> None:
        size = 1 << max(6, (4 * room - 1).bit_length())
        self.generation = generation
        self.room = size // 2  # so that a search ends after a few steps
        self._entries = np.zeros(size, dtype=np.int32)
        # A secret seed, so that no client can send keys that all hash to one entry.
        self._view = IndexView(
            self._entries.ctypes.data, keys.data_ptr(), size - 1, secrets.randbits(63), generation
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
    """All rows of a keys table on one host. Rows of entries, and rows to read, are keys.

    Args:
        memory: The table's.
    """

    def __init__(self, memory: TableMemory) -> None:
        super().__init__(memory)
        self._keys, self._counts = memory.keys, memory.counts
        self._first_row, self._rule = memory.first_row, memory.spec.rule
        self._following = threading.Lock()
        self._known = _KeyIndex(self._keys, self._counts[_GENERATION], 0)
        self._keys_view = KeysView(self._at, address_of(self._counts), self._first_row.data_ptr())
        self._keys_at = self._keys_view.address
        self._get_keys_in_c, self._add_keys_in_c = FUNCTIONS["keys_get"], FUNCTIONS["keys_add"]

    def begin(self, init: Tensor) -> None:
        """Say what every row holds at first."""
        self._first_row.copy_(init)

    def _first_rows_of(self, keys: Tensor) -> Tensor:
        """Return (K, cols), or (1, cols) where all are the same."""
        if self._rule is None:
            return self._first_row
        return self._rule.draw(keys.numpy(), self._spec.cols).to(self._spec.dtype)

    # --- looking keys up --------------------------------------------------------------------------

    def _follow(self, *, settled: bool = False) -> _KeyIndex:
        """Return an index of the keys that are there now, if the words can be read together.

        They can where ``settled``: then the lock is held.
        """
        counts, header = self._counts, self._header
        with self._following:
            word, generation, stop = header[0], counts[_GENERATION], counts[_STOP]
            if settled or (not word & 1 and header[0] == word):
                known = self._known
                if known.generation != generation or known.room < stop:
                    known = _KeyIndex(self._keys, generation, stop)
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

        read = self._read_with
        self._call_settled(lambda: read(self._follow(settled=True), rows, out), timeout_s)

    def _read_with(self, index: _KeyIndex, keys: Tensor, out: Tensor) -> int:
        to, at, count = out.data_ptr(), keys.data_ptr(), keys.numel()
        places = torch.empty_like(keys) if self._rule else None
        answer: int = self._get_keys_in_c(
            self._keys_at, index.at, at, count, to, None if places is None else places.data_ptr()
        )
        if places is not None and answer == DONE and bool((absent := places < 0).any()):
            out[absent] = self._first_rows_of(keys[absent])
        return answer

    def num_keys(self, timeout_s: float) -> list[Tensor]:
        """Return how many keys are there."""
        stop = self._call_settled(lambda: self._counts[_STOP], timeout_s)
        return [torch.tensor(stop, device="cpu")]

    def keys(self, timeout_s: float) -> list[Tensor]:
        """Return a copy of the keys, of one moment."""
        return self._call_settled(lambda: [self._keys[: self._counts[_STOP]].clone()], timeout_s)

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the keys, their values and their states, of one moment."""
        columns = (self._keys, *self.parts)
        return self._call_settled(
            lambda: [each[: self._counts[_STOP]].clone() for each in columns], timeout_s
        )

    def _reserve(self, stop: int) -> None:
        """Have memory for the rows of places up to ``stop``. The lock is held."""
        memory = self._memory
        start = max(self._counts[_STOP], self._counts[RESERVED])
        if stop <= start:
            return
        spare = max(start // 4, _LEAST_ROOM // memory.row_bytes)
        with suppress(OutOfSpace):
            memory.reserve_rows(start, min(max(stop, start + spare), memory.most_rows))
        if self._counts[RESERVED] < stop:
            memory.reserve_rows(start, stop)
        fail_point("room made")

    # --- changing: the lock is held ---------------------------------------------------------------

    def _add_once(self, entry: Entry, wait_ms: int) -> int:
        rows, delta, worker, number = entry
        assert rows is not None
        at, count, source = rows.data_ptr(), rows.numel(), delta.data_ptr()
        index = self._known
        for _ in range(_ATTEMPTS):
            answer: int = self._add_keys_in_c(
                self._keys_at, index.at, at, count, source, worker, number, wait_ms
            )
            if answer != BEHIND:
                return answer
            index = self._follow()
        return UNSETTLED  # so that somebody waits

    def _prepared(self, entry: Entry) -> Entry:
        assert entry.rows is not None
        places = self._places_of(entry.rows.clone())  # others may change the rows
        return super()._prepared(entry._replace(rows=places))

    def _places_of(self, keys: Tensor) -> Tensor:
        """Return the places of keys; bring those that are not there."""
        places, stop = torch.empty_like(keys), self._counts[_STOP]
        self._follow(settled=True).find(keys, stop, places)
        absent = places < 0
        new, which = torch.unique(keys[absent], return_inverse=True)
        self._bring(new)
        places[absent] = stop + which
        return places

    def _bring(self, keys: Tensor) -> None:
        counts = self._counts
        first = counts[_STOP]
        after = first + len(keys)
        if len(keys):
            self._reserve(after)
            values, *states = self.parts
            values[first:after] = self._first_rows_of(keys)
            for state in states:
                state[first:after] = 0.0  # there may be those of an add that was undone
            self._keys[first:after] = keys
            fail_point("keys written")
        counts[_NEXT_STOP] = after
        if len(keys):
            fail_point("keys pending")

    def _commit(self) -> None:
        self._counts[_STOP] = self._counts[_NEXT_STOP]

    def _replace(self, parts: list[Tensor]) -> None:
        count, counts = len(parts[0]), self._counts
        for own, given in zip((self._keys, *self.parts), parts, strict=True):
            own[:count] = given
            fail_point("restoring")
        counts[_STOP] = count
        counts[_GENERATION] += 1
