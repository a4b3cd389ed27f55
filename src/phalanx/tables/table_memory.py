"""The memory of a table on one host: the words and locks that its processes share, and the rows.

    table      READY | APPLIED | TAKEN | · | · | · | · | ·                   8 bytes each
    header     of the rows (part.py)
    worker w   CLOCK | ARRIVED_AS | ROUND, END | ROUND, END | · | ·
    DONE       a word for each worker, and one for merged rounds (part.py)
    locks      of the rounds; of the rows; of each worker's log
    of keys    the counts (keys.py), and the row that keys have at first
    rows       [keys], values, states
    record     old values and states of the rows of an add, and their numbers (part.py)

Words of the table are written with its lock held, those of a worker by this worker alone, or with
its log's lock held. ARRIVED_AS is the incarnation that wrote CLOCK.

The record, and the rows of a keys table, have as many addresses as they may ever need; their memory
is taken as adds and keys come, and kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.errors import OutOfSpace
from phalanx.ipc import Mutex, Regions
from phalanx.tables.membership import MAX_WORKERS
from phalanx.tables.spec import TableSpec

MERGED = MAX_WORKERS
"""Under which number merged rounds are made."""
READY, APPLIED, TAKEN = range(3)
"""Three words: 1 once the table has its first values, the last round applied, the last begun."""
CLOCK, ARRIVED_AS, LOGS = range(3)
"""A worker's last round, as whom it came there, and its logs' words (log.py)."""
RESERVED = 3
"""Of the counts of keys: for how many there is memory."""
RECORDED, NUMBERED = 5, 6
"""Of the header: for how many rows the record has memory, and for how many rows' numbers."""

_MOST_KEYS = 1 << 30  # an index has places in 32 bits
_MOST_BYTES = 1 << 39  # of a keys table: addresses that are kept for it, not memory
_MOST_RECORD_BYTES = 1 << 34  # of a record, and four times the table's if these are more
_LEAST_RECORD_BYTES = 1 << 16
_LINE, _COUNTS = 8, 8  # words
_PAGE = 4096

_Kinds = list[tuple[torch.dtype, int]]  # of columns: dtype, and numbers in a row


class TableMemory:
    """The memory of a table, as one process sees it.

    Args:
        spec: The table, or a host's part of it.
        regions: Where its region comes from, zeros at first.
        rank_of: Tells as which worker a process works, for errors of locks.

    Attributes:
        region: All of it.
        lock: The table's; held to make a round's adds.
        lock_of_rows: Held to change rows.
        table: The table's words.
        header: Those of the rows.
        done: Which numbered adds are in (part.py).
        row_bytes: Of all columns together.
        columns: Values and each state, as (rows, width).
        keys: Of a keys table: the key of each row.
        counts: Of a keys table: see keys.py.
        first_row: Of a keys table: what its rows hold at first, as (1, cols).
        most_rows: For how many rows there are addresses.
        old_columns, old_numbers: The record: where old values and states go, and their rows.

    Raises:
        OutOfSpace: There is not so much memory.
    """

    def __init__(
        self, spec: TableSpec, regions: Regions, rank_of: Callable[[int], int | None]
    ) -> None:
        self.spec = spec
        self._rank_of = rank_of
        kinds: _Kinds = [(torch.int64, 1), *spec.columns] if spec.has_keys else spec.columns
        self._row_bytes = _row_bytes(kinds)
        self.row_bytes = sum(self._row_bytes)
        self.most_rows = spec.rows
        if spec.has_keys:
            self.most_rows = min(_MOST_KEYS, max(1, _MOST_BYTES // self.row_bytes))
        recorded: _Kinds = [*spec.columns, (torch.int64, 1)]
        self._recorded_bytes = _row_bytes(recorded)
        self._most_recorded = max(_MOST_RECORD_BYTES // sum(self._recorded_bytes), 4 * spec.rows)
        self._place()
        self.region = regions.open_region(
            f"table-{spec.name}", self._end, reserved=self._head if spec.has_keys else self._stop
        )
        buffer = self.region.buffer
        self._words = buffer[: self._locks].cast("q")
        self.table, self.header = self._words[:_LINE], self._words[_LINE : 3 * _LINE]
        self.done = self._words[self._done : self._done + MAX_WORKERS + 1]
        self.lock, self.lock_of_rows = self._lock(0, "rounds"), self._lock(1, "rows")
        self.counts = buffer[self._counts : self._counts + 8 * _COUNTS].cast("q")
        (self.first_row,) = self._views([spec.columns[0]], [self._first_row], int(spec.has_keys))
        self.columns = self._views(kinds, self._starts, self.most_rows)
        self.keys = self.columns.pop(0).view(-1) if spec.has_keys else torch.empty(0, device="cpu")
        *self.old_columns, numbers = self._views(recorded, self._records, self._most_recorded)
        self.old_numbers = numbers.view(-1)

    def _place(self) -> None:
        """Find where everything begins, in bytes."""
        spec, at = self.spec, 0

        def take(nbytes: int, unit: int = 64) -> int:
            nonlocal at
            start = -(-at // unit) * unit
            at = start + nbytes
            return start

        take(8 * _LINE * 3)
        self._workers = take(8 * _LINE * MAX_WORKERS) // 8
        self._done = take(8 * (MAX_WORKERS + 1)) // 8
        self._locks = take(Mutex.NBYTES * (2 + MAX_WORKERS))
        self._counts = take(8 * _COUNTS * spec.has_keys)
        self._first_row = take(spec.cols * spec.dtype.itemsize * spec.has_keys)
        self._head = take(0, _PAGE)  # what is there from the beginning
        self._starts = [take(self.most_rows * size, _PAGE) for size in self._row_bytes]
        self._stop = take(0, _PAGE)
        self._records = [take(self._most_recorded * size, _PAGE) for size in self._recorded_bytes]
        self._end = at

    def _views(self, kinds: _Kinds, starts: list[int], num_rows: int) -> list[Tensor]:
        return [
            self.region.tensor(dtype, num_rows * width, start).view(num_rows, width)
            for (dtype, width), start in zip(kinds, starts, strict=True)
        ]

    # --- words and locks --------------------------------------------------------------------------

    def worker(self, worker: int) -> memoryview:
        """Return the words of a worker."""
        start = self._workers + _LINE * worker
        return self._words[start : start + _LINE]

    def of_workers(self, word: int) -> list[int]:
        """Return one word of every worker."""
        stop = self._workers + _LINE * MAX_WORKERS
        return self._words[self._workers + word : stop : _LINE].tolist()

    def lock_of_log(self, worker: int) -> Mutex:
        """Return the lock of a worker's log."""
        return self._lock(2 + worker, f"log of worker {worker}")

    def _lock(self, index: int, what: str) -> Mutex:
        memory = self.region.buffer[self._locks + Mutex.NBYTES * index :]
        return Mutex(memory, f"{what} of table {self.spec.name}", self._rank_of)

    # --- rows -------------------------------------------------------------------------------------

    def reserve_rows(self, start: int, stop: int) -> None:
        """Take the memory of rows of a keys table.

        Raises:
            OutOfSpace: There is not so much, or there cannot be so many rows.
        """
        self._refuse_more(stop, self.most_rows, "keys on a host")
        for begin, size in zip(self._starts, self._row_bytes, strict=True):
            self.region.reserve_part(begin + start * size, (stop - start) * size)
        self.counts[RESERVED] = stop

    def extend_record(self, num_rows: int, *, has_numbers: bool) -> None:
        """Take memory for the record of an add.

        Raises:
            OutOfSpace: There is not so much, or there cannot be so many rows.
        """
        self._refuse_more(num_rows, self._most_recorded, "rows in an add")
        least = _LEAST_RECORD_BYTES // sum(self._recorded_bytes)
        stop = min(max(num_rows, least), self._most_recorded)
        *columns, numbers = zip(self._records, self._recorded_bytes, strict=True)
        for word, extended in ((RECORDED, columns), (NUMBERED, [numbers] * has_numbers)):
            start = self.header[word]
            if extended and start < stop:
                for begin, size in extended:
                    self.region.reserve_part(begin + start * size, (stop - start) * size)
                self.header[word] = stop

    def _refuse_more(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise OutOfSpace(
                f"Table {self.spec.name!r} must have at most {most} {what}, but not {count}.",
                None,
                None,
            )


def _row_bytes(kinds: _Kinds) -> list[int]:
    return [dtype.itemsize * width for dtype, width in kinds]
