"""A range of rows that processes share; a killed process never leaves it half changed.

    header   | WORD | WORKER | NUMBER | LOGGED | AT | COUNT | UNDONE | ·        8 bytes each
    record   old values and states of one block of rows, and the numbers of these rows
    DONE     for each worker, the number of the last of its numbered adds that is in

# Note [An add, store by store]

    WORKER, NUMBER, LOGGED   whose add it is
    AT = 0
    WORD odd                 an add is under way
    for each block of rows:
      AT = 2 · first         the block that begins at row `first` of the add is next, and untouched
      old rows → record; COUNT    of rows in it, negative where they follow one another
      AT = 2 · first + 1     its old rows are in the record
      rows changed
    AT = 2 · (all rows)      all are changed
    DONE[WORKER] = NUMBER    where the add has a number
    WORD + 1                 even

Whoever takes the lock and finds WORD odd settles: if AT is odd it puts the record back. Then an add
that is in its worker's log (log.py) is made from row AT / 2 on, so what was logged will be whole.
One that is not, of one block, is over: absent if the record was put back or nothing was changed,
else whole. A death while somebody settles changes nothing in that.

So an add with a number counts once however often it is asked for: DONE says so, and it changes
between the last row and the end of the add.

# Note [Reading without the lock]
A reader notes an even WORD, copies, and looks at WORD again: where it is the same, no add had begun
meanwhile. Else it tries again, and then takes the lock. So a get waits for an add that is under
way, whichever rows it changes.

C (native/part.c) does both where the updater has no state, with fences for processors that reorder
stores: an add of one block in one call, each larger block in one, cut so that it stays in the
nearest cache. Other updaters, and values that are assigned, are written in Python.

# Note [A restore]
It takes the place of everything, and has no record: LOGGED = 2 while it is under way. Where a death
interrupts it, all calls say so until the table is restored again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from phalanx.errors import StateError
from phalanx.ipc import Mutex, Waiting, fail_point, fail_points
from phalanx.memory import all_finite, all_within, copy_to
from phalanx.native import DTYPES, FUNCTIONS, PartView, address_of
from phalanx.tables.table_memory import TableMemory
from phalanx.tables.updaters import Change
from phalanx.tables.values import outside

POINTS = (
    "before lock",
    "lock held",
    "undo written",
    "half the rows written",
    "before unlock",
    "after unlock",
)
"""Fail points of an add, in order (:func:`phalanx.ipc.fail_point`)."""

BLOCK_ROWS = 1 << 18  # changed at once, where the record has room for them
_WORD, _WORKER, _NUMBER, _LOGGED, _AT, _COUNT, _UNDONE = range(7)
DONE, _LATE, _OUTSIDE, _NOT_FINITE, UNSETTLED, BEHIND, _ABSENT = range(7)
"""What C answers."""
_NOBODY = -1
_RESTORES = 2
_SLICE_MS = 20

T = TypeVar("T")


class Entry(NamedTuple):
    """One add, checked.

    Attributes:
        rows: Of the part, as the table numbers them; None for all.
        delta: What is added to them.
        worker: The one that adds.
        assigns: Whether the delta is the new value.
        number: Of an add that may come again, among those of its worker, from 1; else 0.
        unchecked: Whether the delta must be finite and has not been looked at yet.
    """

    rows: Tensor | None
    delta: Tensor
    worker: int
    assigns: bool = False
    number: int = 0
    unchecked: bool = False


class NotFinite(Exception):
    """A delta that had to be finite is not; the table is as it was."""


class TablePart:
    """One range of rows, as one process sees it.

    Args:
        memory: The table's.
        lock: Held to change anything.
        logged: Returns what of a logged add is this part's, by worker and number.
    """

    def __init__(
        self,
        memory: TableMemory,
        lock: Mutex,
        logged: Callable[[int, int], Entry],
    ) -> None:
        spec = memory.spec
        self.lock = lock
        self.parts = parts = memory.columns
        self.first_row = spec.first_row
        self.num_rows, num_cols = parts[0].shape
        self._old_parts, self._old_numbers = memory.record()
        self.most_rows = min(len(self._old_numbers), BLOCK_ROWS)
        self._header, self._done = memory.header, memory.done
        self._spec = spec
        self._updater = updater = spec.updater
        self._logged = logged
        self._view = PartView(
            address_of(self._header),
            address_of(self._done),
            lock.address,
            parts[0].data_ptr(),
            self._old_parts[0].data_ptr(),
            self._old_numbers.data_ptr(),
            self.num_rows,
            num_cols,
            self.first_row,
            list(DTYPES).index(parts[0].dtype),
            1.0 if updater.scale is None else updater.scale,
        )
        self._at = self._view.address
        self._is_simple = updater.scale is not None
        self._get_in_c, self._add_in_c = FUNCTIONS["part_get"], FUNCTIONS["part_add"]
        self._make_in_c = FUNCTIONS["part_make"]

    def begin(self, init: Tensor) -> None:
        """Give a new part its first values: one number, or all of its rows."""
        values, *states = self.parts
        for state, first in zip(states, self._updater.first_states(), strict=True):
            state.fill_(first)
        values.copy_(init)

    @property
    def num_undone(self) -> int:
        """How many adds a death had interrupted that others put back, or ended."""
        return self._header[_UNDONE]

    def has(self, worker: int, number: int) -> bool:
        """Tell whether a numbered add is in."""
        return self._done[worker] >= number

    # --- reading ----------------------------------------------------------------------------------

    def read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        """Copy rows (by the table's numbers, None for all) into ``out``; never half of an add.

        Raises:
            ConfigError: A row is not of this part.
        """
        at, count = (None, -1) if rows is None else (rows.data_ptr(), rows.numel())
        to = out.data_ptr()
        answer = self._get_in_c(self._at, at, count, to)
        if answer == _OUTSIDE:
            assert rows is not None
            raise outside(rows, self._spec)
        if answer != DONE:
            self._call_settled(lambda: self._get_in_c(self._at, at, count, to), timeout_s)

    def _call_settled(self, call: Callable[[], T], timeout_s: float) -> T:
        """Call with the lock held, where no add is half made."""
        with self.lock.held(timeout_s):
            fail_point("reader's lock held")
            self._settle()
            return call()

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state, of one moment."""
        return self._call_settled(lambda: [part.clone() for part in self.parts], timeout_s)

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add of one block, whole or not at all; one that has a number, once.

        Raises:
            NotFinite: The entry was unchecked, and is not.
            ConfigError: A row is not of this part.
        """
        if self._is_simple and not entry.assigns and fail_points.fault is None:
            answer = self._add_once(entry, 0)
            if answer != DONE:
                self._add_after(answer, entry, timeout_s)
            return
        self._refuse_outside(entry.rows)
        self.change(checked(entry), timeout_s, logged=False)

    def _refuse_outside(self, rows: Tensor | None) -> None:
        if rows is not None and not all_within(rows, self.num_rows, self.first_row):
            raise outside(rows, self._spec)

    def _add_after(self, answer: int, entry: Entry, timeout_s: float) -> None:
        """Take an add that C has not taken at once."""
        waiting = Waiting(timeout_s)
        while answer != DONE:
            if answer == _NOT_FINITE:
                raise NotFinite
            if answer == _OUTSIDE:
                assert entry.rows is not None
                raise outside(entry.rows, self._spec)
            if answer == _ABSENT:
                self.change(entry, waiting.remaining_s(), logged=False)
                return
            if answer == UNSETTLED:
                self._call_settled(bool, timeout_s)
            if waiting.over():
                raise self.lock.late(timeout_s)
            answer = self._add_once(entry, _SLICE_MS)

    def _add_once(self, entry: Entry, wait_ms: int) -> int:
        rows, delta, worker, _, number, unchecked = entry
        at, count = (None, self.num_rows) if rows is None else (rows.data_ptr(), rows.numel())
        source = delta.data_ptr()
        answer: int = self._add_in_c(
            self._at, at, count, source, unchecked, worker, number, wait_ms
        )
        return answer

    def change(self, entry: Entry, timeout_s: float, *, logged: bool) -> None:
        """Take one add, whole or not at all; one that has a number, once.

        Args:
            entry: The add, checked.
            timeout_s: How long to wait for the lock.
            logged: Whether others find it in its worker's log, so that it may have several blocks.
        """
        fail_point("before lock")
        with self.lock.held(timeout_s):
            fail_point("lock held")
            self._settle()
            if entry.number and self.has(entry.worker, entry.number):
                return
            entry = self._prepared(entry)
            self._rehearse(entry)
            self._begin(entry, logged=logged)
            try:
                self._make(entry, 0)
            except Exception:  # of the updater
                if self._header[_AT] == 0:  # else whoever comes next settles
                    if logged:
                        self._done[entry.worker] = entry.number
                    self._header[_WORD] += 1
                raise
            fail_point("before unlock")
        fail_point("after unlock")

    def _begin(self, entry: Entry, *, logged: bool) -> None:
        header = self._header
        header[_WORKER] = entry.worker if entry.number else _NOBODY
        header[_NUMBER] = entry.number
        header[_LOGGED] = logged
        header[_AT] = 0
        header[_WORD] += 1

    def _end(self, worker: int, number: int) -> None:
        self._commit()
        if number:
            self._done[worker] = number
        self._header[_WORD] += 1

    def _commit(self) -> None:
        """Let what an add has brought count; a part of rows has nothing."""

    def _settle(self) -> None:
        """End what a dead process has begun. The lock is held."""
        header = self._header
        if not header[_WORD] & 1:
            return
        at, worker, number = header[_AT], header[_WORKER], header[_NUMBER]
        if header[_LOGGED] == _RESTORES:
            raise StateError(
                f"Table {self._spec.name!r} must be restored as a whole, but its master died "
                "meanwhile. Call `restore` again."
            )
        if at & 1:
            self._put_back()
        if header[_LOGGED]:
            entry = self._prepared(self._logged(worker, number))
            header[_UNDONE] += 1
            self._make(entry, at >> 1)
        elif at & 1 or at == 0:
            header[_UNDONE] += 1
            header[_WORD] += 1
        else:
            self._end(worker, number)

    def _put_back(self) -> None:
        count, first = self._header[_COUNT], self._header[_AT] >> 1
        for part, old in zip(self.parts, self._old_parts, strict=True):
            if count < 0:
                part[first : first - count] = old[:-count]
            else:
                part.index_copy_(0, self._old_numbers[:count], old[:count])

    def _prepared(self, entry: Entry) -> Entry:
        """Return an add with its rows counted from the part's first, each once if it must be."""
        rows, delta, *_ = entry
        if rows is None:
            return entry
        rows = rows - self.first_row if self.first_row else rows
        if self._is_simple and not entry.assigns:
            return entry._replace(rows=rows)
        if not entry.assigns:  # whose rows are there once
            rows, delta = add_up_repeats(rows, delta)
        return entry._replace(rows=rows, delta=delta)

    def _rehearse(self, entry: Entry) -> None:
        """Let a user's updater raise before anything is changed, where there are several blocks."""
        count = self.num_rows if entry.rows is None else entry.rows.numel()
        if count > self.most_rows and not self._updater.is_built_in:
            for first in range(0, count, self.most_rows):
                stop = min(first + self.most_rows, count)
                rows = None if entry.rows is None else entry.rows[first:stop]
                self._apply(entry, rows, first, stop)

    def _make(self, entry: Entry, first: int) -> None:
        """Make an add that was begun, from its row ``first`` on, and end it."""
        header = self._header
        count = self.num_rows if entry.rows is None else entry.rows.numel()
        in_c = self._is_simple and not entry.assigns
        while first < count:
            stop = min(first + self.most_rows, count)
            if in_c:
                self._change_in_c(entry, first, stop)
            else:
                self._change_block(entry, first, stop)
            first = stop
            fail_point("half the rows written")
        header[_AT] = 2 * max(count, 1)
        self._end(entry.worker, entry.number)

    def _change_in_c(self, entry: Entry, first: int, stop: int) -> None:
        rows, delta = entry.rows, entry.delta
        at = None if rows is None else rows.data_ptr()
        self._make_in_c(self._at, at, first, stop, delta.data_ptr())

    def _change_block(self, entry: Entry, first: int, stop: int) -> None:
        header = self._header
        header[_AT] = 2 * first
        rows = self._save(entry.rows, first, stop)
        news = self._apply(entry, rows, first, stop)
        header[_AT] = 2 * first + 1
        fail_point("undo written")
        for target, new in zip(self.parts, news, strict=False):
            if rows is None:
                target[first:stop] = new
            else:
                target.index_copy_(0, rows, new)

    def _save(self, rows: Tensor | None, first: int, stop: int) -> Tensor | None:
        """Copy old rows into the record, and return their numbers, which stay as they are."""
        count = stop - first
        if rows is None:
            for part, old in zip(self.parts, self._old_parts, strict=True):
                copy_to(part[first:stop], old[:count])
            self._header[_COUNT] = -count
            return None
        numbers = self._old_numbers[:count]
        # Brought within, so that no other memory is written, whatever happens to `rows`.
        torch.clamp(rows[first:stop], 0, self.num_rows - 1, out=numbers)
        for part, old in zip(self.parts, self._old_parts, strict=True):
            torch.index_select(part, 0, numbers, out=old[:count])
        self._header[_COUNT] = count
        return numbers

    def _apply(self, entry: Entry, rows: Tensor | None, first: int, stop: int) -> list[Tensor]:
        """Return the values of a block, and its states unless the values are assigned."""
        delta = entry.delta[first:stop]
        if entry.assigns:
            return [delta]
        chosen = slice(first, stop) if rows is None else rows
        news = [part[chosen].clone() for part in self.parts]
        self._updater.apply(Change(news[0], delta, news[1:]))
        return news

    # --- restoring --------------------------------------------------------------------------------

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by what :meth:`copy_all` returned.

        Raises:
            OutOfSpace: There is no memory for so many rows. Nothing is changed.
        """
        header = self._header
        with self.lock.held(timeout_s):
            if header[_LOGGED] != _RESTORES:
                self._settle()
            self._reserve(len(parts[0]))
            header[_LOGGED] = _RESTORES
            header[_WORD] |= 1
            self._replace(parts)
            header[_WORD] += 1
            header[_LOGGED] = 0

    def _reserve(self, stop: int) -> None:
        """Have memory for so many rows; where they are numbered, it is there."""

    def _replace(self, parts: list[Tensor]) -> None:
        for own, given in zip(self.parts, parts, strict=True):
            own.copy_(given)
            fail_point("restoring")


def checked(entry: Entry) -> Entry:
    """Return an add after a look at its numbers.

    Raises:
        NotFinite: It was unchecked, and is not.
    """
    if not entry.unchecked:
        return entry
    if not all_finite(entry.delta):
        raise NotFinite
    return entry._replace(unchecked=False)


def add_up_repeats(rows: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row once, and the sum of what was to be added to it, in the order given."""
    unique, inverse = torch.unique(rows, return_inverse=True)
    if len(unique) == rows.numel():
        return rows, delta
    summed = torch.zeros((len(unique), delta.shape[1]), dtype=delta.dtype, device="cpu")
    return unique, summed.index_add_(0, inverse, delta)
