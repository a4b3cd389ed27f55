"""The adds that a worker has written down for a round of a table, before they are made.

    line of worker w   … | ROUND, END | ROUND, END | …      8 bytes each
    an entry           a head (whether it has rows, how many, number), the rows, the delta

An entry counts as soon as END lies behind it. From then on it will be in the round, whoever dies
(rounds.py). A worker has two logs, because it may have come to the end of a round that is not made
yet, and add to the next one. What has been made is written over.

A log is written with its lock held, by its worker, or by this host's server in its name. It has far
more addresses than it needs; memory is taken as adds come, and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from phalanx.errors import OutOfSpace, StateError
from phalanx.ipc import Mutex, Region, aligned
from phalanx.memory import copy_to
from phalanx.tables.part import Entry
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.table_memory import LOGS, TableMemory

_ROUND, _END = range(2)
NUM_LOGS = 2
_HEAD_BYTES = 64
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 34  # addresses of a log, and four times the table's if these are more
_ROUND_BITS = 32  # more than a log has room for entries


class WorkerLog:
    """The logs of one worker for one table, as one process sees them.

    Args:
        memory: The table's.
        worker: Whose log.
        lock: Held to write.
        regions: Where its memory comes from.
    """

    def __init__(self, memory: TableMemory, worker: int, lock: Mutex, regions: RunRegions) -> None:
        self.lock = lock
        self._worker = worker
        line = memory.worker(worker)
        self._logs = [
            _Log(memory, worker, index, line[LOGS + 2 * index : LOGS + 2 * index + 2], regions)
            for index in range(NUM_LOGS)
        ]

    def append(self, entry: Entry, number: int, applied: int) -> None:
        """Write an add down for round ``number``, where ``applied`` is the last that is made.

        Raises:
            StateError: Adds of two open rounds are there already.
            OutOfSpace: There is no room for it.
        """
        log = self._log_of(number)
        if log is None:
            log = next((each for each in self._logs if each.round <= applied), None)
            if log is None:
                raise StateError(
                    f"At most one round of a table must be open when worker {self._worker} adds to "
                    "the next, but two are. Call `wait()` on its earlier gets."
                )
            log.begin(number)
        log.put(entry)

    def entries(self, number: int) -> list[Entry]:
        """Return the adds of a round, in order, over the log's own memory.

        Their numbers rise from round to round, also where one worker's number has been another's
        that had come further.
        """
        log = self._log_of(number)
        entries = () if log is None else log.entries()
        return [e._replace(number=n) for n, e in enumerate(entries, first_number(number))]

    def _log_of(self, number: int) -> _Log | None:
        return next((log for log in self._logs if log.round == number), None)


def first_number(round_number: int) -> int:
    """Return the number of a round's first add, as its part knows it."""
    return (round_number << _ROUND_BITS) + 1


class _Log:
    """The entries of one round, end to end."""

    def __init__(
        self, memory: TableMemory, worker: int, index: int, words: memoryview, regions: RunRegions
    ) -> None:
        self._memory = memory
        self._spec = memory.spec
        self._worker = worker
        self._name = f"log-{worker}-{index}-{memory.spec.name}"
        self._words = words
        self._regions = regions
        self._reserved = _FIRST_BYTES
        self._last = (0, 0, 0)  # round, END and last number, as this process knows them

    @cached_property
    def _region(self) -> Region:
        nbytes = max(_MOST_BYTES, 4 * self._spec.rows * self._memory.row_bytes)
        return self._regions.open_region(self._name, nbytes, reserved=_FIRST_BYTES)

    @property
    def round(self) -> int:
        """The round whose adds it holds."""
        return self._words[_ROUND]

    def begin(self, number: int) -> None:
        """Begin at the start, for adds of round ``number``."""
        self._words[_END] = 0
        self._words[_ROUND] = number

    def put(self, entry: Entry) -> None:
        """Write an entry; it counts once END says so. One that is there is not written again."""
        if entry.number and entry.number <= self._last_number():
            return
        at = self._words[_END]
        end = at + _entry_bytes(entry)
        self._reserve(end)
        self._write(at, entry)
        self._words[_END] = end
        self._last = (self.round, end, entry.number)

    def _last_number(self) -> int:
        """Return the highest number among the entries."""
        here = (self.round, self._words[_END])
        if self._last[:2] != here:  # another process has written
            self._last = (*here, max((each.number for each in self.entries()), default=0))
        return self._last[2]

    def entries(self) -> Iterator[Entry]:
        """Yield the entries, over the log's own memory."""
        at, end = 0, self._words[_END]
        while at < end:
            entry = self._read(at)
            at += _entry_bytes(entry)
            yield entry

    def _reserve(self, stop: int) -> None:
        """Have memory for so many bytes."""
        region, start = self._region, self._reserved
        if stop > region.nbytes:
            raise OutOfSpace(
                f"A log of table {self._spec.name!r} must have at most {region.nbytes} bytes, but "
                f"would have {stop}. Add fewer rows at once, or end the round by `get`.",
                stop,
                None,
            )
        if stop > start:
            region.reserve_part(start, stop - start)
            self._reserved = stop

    def _head(self, at: int) -> memoryview:
        return self._region.buffer[at : at + _HEAD_BYTES].cast("q")

    def _write(self, at: int, entry: Entry) -> None:
        head, region = self._head(at), self._region
        head[0] = entry.rows is not None
        head[1] = len(entry.delta)
        head[2] = entry.number
        at += _HEAD_BYTES
        if entry.rows is not None:
            region.tensor(torch.int64, len(entry.rows), at).copy_(entry.rows)
            at += aligned(8 * len(entry.rows))
        flat = entry.delta.reshape(-1)
        copy_to(flat, region.tensor(entry.delta.dtype, len(flat), at))

    def _read(self, at: int) -> Entry:
        has_rows, num_rows, number = self._head(at)[:3]
        region, spec = self._region, self._spec
        at += _HEAD_BYTES
        rows: Tensor | None = None
        if has_rows:
            rows = region.tensor(torch.int64, num_rows, at)
            at += aligned(8 * num_rows)
        cols = spec.delta_cols
        delta = region.tensor(spec.dtype, num_rows * cols, at).view(num_rows, cols)
        return Entry(rows, delta, self._worker, number)


def _entry_bytes(entry: Entry) -> int:
    rows = 0 if entry.rows is None else 8 * len(entry.rows)
    return _HEAD_BYTES + aligned(rows) + aligned(entry.delta.numel() * entry.delta.itemsize)
