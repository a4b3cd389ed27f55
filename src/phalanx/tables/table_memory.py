"""The memory of a table on one host: the words and locks that its processes share, and the rows.

    table      READY | APPLIED | TAKEN | · | · | · | · | ·                   8 bytes each
    header     of the rows (part.py)
    worker w   CLOCK | ARRIVED_AS | NUMBER | TAIL | FINISHED | ROUND, END | ROUND, END | LOGGED_AS
    DONE       a word for each worker (part.py)
    UNFINISHED a byte for each log: it may hold adds that are not in (log.py)
    locks      of the rounds; of the rows; of each worker's log
    of keys    the counts (keys.py), and what a row holds at first (row_initializer.py)
    record     the old rows of one block of an add, and their numbers (part.py)
    rows       [keys], values, states

Words of the table are written with its lock held, those of a worker by this worker alone, or with
its log's lock held. LOGGED_AS is the incarnation that wrote the log, ARRIVED_AS the one that wrote
CLOCK. Behind the workers' lines is one for a log of the table's own.

A keys table's region is as long as the table may ever become; its memory is taken as keys come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.errors import OutOfSpace
from phalanx.ipc import Mutex
from phalanx.tables.membership import MAX_WORKERS
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec

MERGED = MAX_WORKERS
"""Under which number merged rounds are made."""
READY, APPLIED, TAKEN = range(3)
"""Three words: 1 once the table has its first values, the last round applied, the last begun."""
CLOCK, ARRIVED_AS, NUMBER, TAIL, FINISHED, LOGS = range(6)
"""A worker's last round, as whom it came there, and its log's words (log.py)."""
LOGGED_AS = 9
RESERVED = 3
"""Of the counts of keys: for how many there is memory."""
NUM_LOGS = MAX_WORKERS + 1

BLOCK_ELEMENTS = 1 << 18  # an add saves and changes one block at a time, while it is in the cache
_BLOCK_KEYS = 1 << 14
_MOST_KEYS = 1 << 30  # an index has places in 32 bits
_MOST_BYTES = 1 << 39  # of a keys table: addresses that are kept for it, not memory
_LINE, _WORKER_LINE, _COUNTS = 8, 16, 8  # words
_RULE_BYTES = 64  # before the first row, see row_initializer.py
_PAGE = 4096

_Kinds = list[tuple[torch.dtype, int]]  # of columns: dtype, and numbers in a row


class TableMemory:
    """The memory of a table, as one process sees it.

    Args:
        spec: The table, or a host's part of it.
        regions: Where its region comes from, zeros at first.

    Attributes:
        region: All of it.
        table: The table's words.
        header: Those of the rows.
        done: Which numbered adds are in (part.py).
        unfinished: A byte for each log.
        columns: Values and each state, as (rows, width).
        keys: Of a keys table: the key of each row.
        counts: Of a keys table: see keys.py.
        first_row_at: Of a keys table: where row_initializer.py has its memory.
        most_rows: For how many rows there are addresses.

    Raises:
        OutOfSpace: There is not so much memory.
    """

    def __init__(self, spec: TableSpec, regions: RunRegions) -> None:
        self.spec = spec
        self._recorded: _Kinds = [*spec.columns, (torch.int64, 1)]
        kinds: _Kinds = [(torch.int64, 1), *spec.columns] if spec.has_keys else spec.columns
        self._row_bytes = [dtype.itemsize * width for dtype, width in kinds]
        self.most_rows = spec.rows
        if spec.has_keys:
            self.most_rows = min(_MOST_KEYS, max(1, _MOST_BYTES // self.row_bytes))
        self._record_rows = _record_rows(spec)
        self._place()
        self.region = regions.open_region(
            f"table-{spec.name}", self._end, reserved=self._head if spec.has_keys else None
        )
        buffer = self.region.buffer
        self._words = buffer[: self._flags].cast("q")
        self.unfinished = buffer[self._flags : self._flags + NUM_LOGS]
        self.table, self.header = self._words[:_LINE], self._words[_LINE : 2 * _LINE]
        self.done = self._words[self._done : self._done + NUM_LOGS]
        self.counts = buffer[self._counts : self._counts + 8 * _COUNTS].cast("q")
        self.columns = self._views(kinds, self._starts, self.most_rows)
        self.keys = self.columns.pop(0).view(-1) if spec.has_keys else torch.empty(0, device="cpu")

    def _place(self) -> None:
        """Find where everything begins, in bytes."""
        spec, at = self.spec, 0

        def take(nbytes: int, unit: int = 64) -> int:
            nonlocal at
            start = -(-at // unit) * unit
            at = start + nbytes
            return start

        take(8 * _LINE * 2)
        self._workers = take(8 * _WORKER_LINE * NUM_LOGS) // 8
        self._done = take(8 * NUM_LOGS) // 8
        self._flags = take(NUM_LOGS)
        self._locks = take(Mutex.NBYTES * (2 + NUM_LOGS))
        self._counts = take(8 * _COUNTS * spec.has_keys)
        self.first_row_at = take((_RULE_BYTES + spec.cols * spec.dtype.itemsize) * spec.has_keys)
        self._record = [
            take(self._record_rows * width * dtype.itemsize) for dtype, width in self._recorded
        ]
        self._head = take(0, _PAGE)  # what is there from the beginning
        self._starts = [
            take(self.most_rows * size, _PAGE if spec.has_keys else 64) for size in self._row_bytes
        ]
        self._end = at

    def _views(self, kinds: _Kinds, starts: list[int], num_rows: int) -> list[Tensor]:
        return [
            self.region.tensor(dtype, num_rows * width, start).view(num_rows, width)
            for (dtype, width), start in zip(kinds, starts, strict=True)
        ]

    # --- words and locks --------------------------------------------------------------------------

    def worker(self, worker: int) -> memoryview:
        """Return the words of a worker."""
        start = self._workers + _WORKER_LINE * worker
        return self._words[start : start + _WORKER_LINE]

    def of_workers(self, word: int) -> list[int]:
        """Return one word of every worker."""
        stop = self._workers + _WORKER_LINE * MAX_WORKERS
        return self._words[self._workers + word : stop : _WORKER_LINE].tolist()

    def lock(self, rank_of: Callable[[int], int | None]) -> Mutex:
        """Return the table's lock."""
        return self._lock(0, "rounds", rank_of)

    def lock_of_rows(self, rank_of: Callable[[int], int | None]) -> Mutex:
        """Return the lock of the rows."""
        return self._lock(1, "rows", rank_of)

    def lock_of_log(self, worker: int, rank_of: Callable[[int], int | None]) -> Mutex:
        """Return the lock of a worker's log."""
        return self._lock(2 + worker, f"log of worker {worker}", rank_of)

    def _lock(self, index: int, what: str, rank_of: Callable[[int], int | None]) -> Mutex:
        at = self._locks + Mutex.NBYTES * index
        memory = self.region.buffer[at : at + Mutex.NBYTES]
        return Mutex(memory, f"{what} of table {self.spec.name}", rank_of)

    # --- rows -------------------------------------------------------------------------------------

    def record(self) -> tuple[list[Tensor], Tensor]:
        """Return where old values and states go, and the numbers of their rows."""
        *parts, rows = self._views(self._recorded, self._record, self._record_rows)
        return parts, rows.view(-1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, all columns together."""
        return sum(self._row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table takes now, without logs."""
        if not self.spec.has_keys:
            return self.region.nbytes
        return self._head + self.row_bytes * self.counts[RESERVED]

    def reserve_rows(self, start: int, stop: int) -> None:
        """Take the memory of rows of a keys table.

        Raises:
            OutOfSpace: There is not so much, or there cannot be so many rows.
        """
        if stop > self.most_rows:
            raise OutOfSpace(
                f"Table {self.spec.name!r} must have at most {self.most_rows} keys on a host, but "
                f"{stop} are to come.",
                None,
                None,
            )
        for begin, size in zip(self._starts, self._row_bytes, strict=True):
            self.region.reserve_part(begin + start * size, (stop - start) * size)
        self.counts[RESERVED] = stop


def _record_rows(spec: TableSpec) -> int:
    """Return how many rows are changed at once: so many that the record stays in the cache."""
    rows = _BLOCK_KEYS if spec.has_keys else spec.rows
    return max(1, min(rows, BLOCK_ELEMENTS // spec.cols))
