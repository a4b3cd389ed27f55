"""A range of rows that processes share; a killed process never leaves it half changed.

    header   WORD | WORKER | NUMBER | BLOCK | AT | RECORDED | NUMBERED | UNDONE | SIDE | NEXT_SIDE
    sides    the rows, and the record: old values and states of the rows of one add
    DONE     for each worker, the number of the last of its numbered adds that is in

# Note [An add, store by store]

    WORKER, NUMBER           whose add it is
    NEXT_SIDE = SIDE         the other one, if the add is to all rows
    BLOCK                    how many rows are changed at once
    AT = 0
    WORD odd                 an add is under way
    for each block of rows:                                     if the add is to all rows:
      old rows → record      behind those of earlier blocks       old rows + delta → record
      AT                     so many rows are in the record
      rows changed
    AT = ALL                 all are changed
    SIDE = NEXT_SIDE         on which side the rows are; the record is the other one
    DONE[WORKER] = NUMBER    where the add has a number
    WORD + 1                 even

A process that takes the lock and finds WORD odd settles: it puts the AT rows of the record back,
the last block first, because a row may be in several; then the add is absent. Where AT is ALL, it
ends the add instead. If it dies meanwhile, the next one settles. An add with a number counts once
however often it is asked for: DONE shows it, and changes between the last row and the end.

The record has memory for RECORDED rows, and for the numbers of NUMBERED; both grow with the adds.
On the table's own side it has no more than the table's: for a longer add the rows are moved back.

# Note [Reading without the lock]
A reader notes an even WORD, copies, and looks at WORD again: where it is the same, no add had begun
meanwhile. Else it tries again, and then takes the lock. So a get waits for an add that is under
way, whichever rows it changes.

C (native/part.c) does both in one call where the updater has no state, with fences for processors
that reorder stores. It looks at each block of a delta before it changes rows: where one is not
finite, it leaves the add as a death would. Other updaters, and new keys, are written in Python.

# Note [A restore]
It takes the place of everything, and has no record: AT = RESTORING while it is under way. Where a
death interrupts it, all calls raise until the table is restored again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from phalanx.errors import StateError
from phalanx.ipc import Waiting, fail_point, fail_points
from phalanx.memory import all_within
from phalanx.native import DTYPES, FUNCTIONS, PartView, address_of
from phalanx.tables.table_memory import NUMBERED, RECORDED, TableMemory
from phalanx.tables.updaters import Updater
from phalanx.tables.values import nonfinite, outside, refuse_nonfinite

BLOCK_ROWS = 1 << 18  # changed at once, where their numbers stay in the cache
_BLOCK_ELEMENTS = 1 << 18
_WORD, _WORKER, _NUMBER, _BLOCK, _AT = range(5)
UNDONE = 7  # how many adds have been put back
_SIDE, _NEXT_SIDE = 8, 9
DONE, _LATE, _OUTSIDE, _NOT_FINITE, UNSETTLED, BEHIND, _ABSENT, _CRAMPED = range(8)
"""What C answers."""
_ALL, _RESTORING = -1, -2  # in place of how many rows are in the record
_SLICE_MS = 20

T = TypeVar("T")


class Entry(NamedTuple):
    """One add.

    Attributes:
        rows: Of the part, as the table numbers them; None for all.
        delta: What is added to them.
        worker: The one that adds.
        number: Of an add that may come again, among those of its worker, from 1; else 0.
    """

    rows: Tensor | None
    delta: Tensor
    worker: int
    number: int = 0


class TablePart:
    """One range of rows, as one process sees it.

    Args:
        memory: The table's.

    Attributes:
        lock: Held to change anything.
    """

    def __init__(self, memory: TableMemory) -> None:
        spec = memory.spec
        self.lock = lock = memory.lock_of_rows
        self._sides = memory.columns, [each[: memory.most_rows] for each in memory.old_columns]
        self._records = memory.old_columns, memory.columns
        self.first_row = spec.first_row
        self.num_rows, num_cols = memory.columns[0].shape
        self._memory = memory
        self._old_numbers = memory.old_numbers
        self._block_rows = max(1, min(_BLOCK_ELEMENTS // num_cols, BLOCK_ROWS))
        self._header, self._done = memory.header, memory.done
        self._spec = spec
        self._updater = updater = spec.updater
        self._view = PartView(
            address_of(self._header),
            address_of(self._done),
            lock.address,
            *(side[0].data_ptr() for side in self._sides),
            self._old_numbers.data_ptr(),
            self.num_rows,
            num_cols,
            self.first_row,
            self._block_rows,
            list(DTYPES).index(spec.dtype),
            1.0 if updater.scale is None else updater.scale,
        )
        self._at = self._view.address
        self._is_simple = updater.scale is not None and type(updater).apply is Updater.apply
        self._get_in_c, self._add_in_c = FUNCTIONS["part_get"], FUNCTIONS["part_add"]
        self._change_in_c = FUNCTIONS["part_change"]

    @property
    def parts(self) -> list[Tensor]:
        """Values and each state, where they are now."""
        return self._sides[self._header[_SIDE]]

    @property
    def _record(self) -> list[Tensor]:
        return self._records[self._header[_SIDE]]

    def begin(self, init: Tensor) -> None:
        """Give a new part its first values: one number, or all of its rows."""
        self.parts[0].copy_(init)

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

    def num_keys(self, timeout_s: float) -> list[Tensor]:  # noqa: ARG002
        """Return how many keys are there, if rows are found by key."""
        return []

    def keys(self, timeout_s: float) -> list[Tensor]:  # noqa: ARG002
        """Return a copy of the keys, of one moment, if rows are found by key."""
        return []

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all; one that has a number, once.

        Raises:
            ConfigError: A row is not of this part, or the delta holds what the table rejects.
            OutOfSpace: There is no memory for the record. Nothing is changed.
        """
        if self._is_simple and fail_points.fault is None:
            answer = self._add_once(entry, 0)
            if answer != DONE:
                self._add_after(answer, entry, timeout_s)
        else:
            self._add_in_python(entry, timeout_s)

    def _add_after(self, answer: int, entry: Entry, timeout_s: float) -> None:
        """Take an add that C has not taken at once."""
        waiting = Waiting(timeout_s)
        while answer != DONE:
            if answer == _OUTSIDE:
                assert entry.rows is not None
                raise outside(entry.rows, self._spec)
            if answer == _ABSENT:
                self._add_in_python(entry, waiting.remaining_s())
                return
            if answer in (UNSETTLED, _NOT_FINITE):
                self._call_settled(bool, waiting.remaining_s())
            if answer == _NOT_FINITE:
                raise nonfinite(self._spec)
            if answer == _CRAMPED:
                self._call_settled(lambda: self._extend_record(entry), waiting.remaining_s())
            if waiting.over():
                raise self.lock.late(timeout_s)
            answer = self._add_once(entry, _SLICE_MS)

    def _add_once(self, entry: Entry, wait_ms: int) -> int:
        rows, delta, worker, number = entry
        at, count = (None, self.num_rows) if rows is None else (rows.data_ptr(), rows.numel())
        source = delta.data_ptr()
        answer: int = self._add_in_c(self._at, at, count, source, worker, number, wait_ms)
        return answer

    def _add_in_python(self, entry: Entry, timeout_s: float) -> None:
        rows, has_keys = entry.rows, self._spec.has_keys
        if not (rows is None or has_keys or all_within(rows, self.num_rows, self.first_row)):
            raise outside(rows, self._spec)
        refuse_nonfinite(entry.delta, self._spec)
        fail_point("before lock")
        with self.lock.held(timeout_s):
            fail_point("lock held")
            self._settle()
            if entry.number and self._done[entry.worker] >= entry.number:
                return
            self._extend_record(entry)
            entry = self._prepared(entry)
            self._begin(entry)
            try:
                self._change_rows(entry)
            except Exception:  # of the updater
                self._undo()
                raise
            self._header[_AT] = _ALL
            self._end(entry.worker, entry.number)
            fail_point("before unlock")
        fail_point("after unlock")

    def _extend_record(self, entry: Entry) -> None:
        """Have memory for the record of an add. The lock is held, and nothing is half made."""
        has_numbers = entry.rows is not None
        count = self.num_rows if entry.rows is None else entry.rows.numel()
        if count > self._header[NUMBERED if has_numbers else RECORDED]:
            self._memory.extend_record(count, has_numbers=has_numbers)
        if count > self.num_rows and self._header[_SIDE]:
            for part, old in zip(self.parts, self._record, strict=True):
                old.copy_(part)
            self._header[_SIDE] = 0

    def _prepared(self, entry: Entry) -> Entry:
        """Return an add with its rows counted from the part's first, each once if it must be."""
        if entry.rows is None:
            return entry
        rows, delta = entry.rows - self.first_row, entry.delta
        if not self._is_simple:
            rows, delta = add_up_repeats(rows, delta)
        return entry._replace(rows=rows, delta=delta)

    def _begin(self, entry: Entry) -> None:
        header = self._header
        header[_WORKER] = entry.worker
        header[_NUMBER] = entry.number
        header[_NEXT_SIDE] = header[_SIDE] ^ (entry.rows is None)
        header[_BLOCK] = self._block_rows
        header[_AT] = 0
        header[_WORD] += 1

    def _change_rows(self, entry: Entry) -> None:
        count, block = len(entry.delta), self._block_rows
        for first in range(0, count, block):
            span = slice(first, min(first + block, count))
            rows: slice | Tensor = span
            targets = self._record
            if entry.rows is not None:
                rows, targets = self._old_numbers[span].copy_(entry.rows[span]), self.parts
                for part, old in zip(self.parts, self._record, strict=True):
                    old[span] = part[rows]
                self._header[_AT] = span.stop
            fail_point("undo written")
            self._change_block(rows, targets, entry.delta[span])
            fail_point("half the rows written")

    def _change_block(self, rows: slice | Tensor, targets: list[Tensor], delta: Tensor) -> None:
        if self._is_simple:
            at, first = (rows.data_ptr(), 0) if isinstance(rows, Tensor) else (None, rows.start)
            self._change_in_c(self._at, at, first, len(delta), delta.data_ptr())
            return
        news = [part[rows].clone() for part in self.parts]
        self._updater.apply(news[0], delta, news[1:])
        for target, new in zip(targets, news, strict=True):
            target[rows] = new

    def _end(self, worker: int, number: int) -> None:
        self._commit()
        if number:
            self._done[worker] = number
        self._header[_WORD] += 1

    def _commit(self) -> None:
        """Let what an add has brought count."""
        self._header[_SIDE] = self._header[_NEXT_SIDE]

    # --- undoing: the lock is held ----------------------------------------------------------------

    def _settle(self) -> None:
        """Undo, or end, what a dead process has begun."""
        header = self._header
        if not header[_WORD] & 1:
            return
        if header[_AT] == _RESTORING:
            raise StateError(
                f"Table {self._spec.name!r} must be restored as a whole, but its master died "
                "meanwhile. Call `restore` again."
            )
        if header[_AT] == _ALL:
            self._end(header[_WORKER], header[_NUMBER])
        else:
            header[UNDONE] += 1
            self._undo()

    def _undo(self) -> None:
        self._put_back()
        self._header[_WORD] += 1

    def _put_back(self) -> None:
        count, block = self._header[_AT], self._header[_BLOCK]
        for part, old in zip(self.parts, self._record, strict=True):
            for first in reversed(range(0, count, block)):
                span = slice(first, min(first + block, count))
                part[self._old_numbers[span]] = old[span]

    # --- restoring --------------------------------------------------------------------------------

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by what :meth:`copy_all` returned.

        Raises:
            OutOfSpace: There is no memory for so many rows. Nothing is changed.
        """
        header = self._header
        with self.lock.held(timeout_s):
            if header[_AT] != _RESTORING:
                self._settle()
            self._reserve(len(parts[0]))
            header[_AT] = _RESTORING
            header[_WORD] |= 1
            self._replace(parts)
            header[_WORD] += 1

    def _reserve(self, stop: int) -> None:
        """Have memory for so many rows; where they are numbered, it is there."""

    def _replace(self, parts: list[Tensor]) -> None:
        for own, given in zip(self.parts, parts, strict=True):
            own.copy_(given)
            fail_point("restoring")


def add_up_repeats(rows: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row once, and the sum of what was to be added to it, in the order given."""
    unique, inverse = torch.unique(rows, return_inverse=True)
    if len(unique) == rows.numel():
        return rows, delta
    summed = torch.zeros((len(unique), delta.shape[1]), dtype=delta.dtype, device="cpu")
    return unique, summed.index_add_(0, inverse, delta)
