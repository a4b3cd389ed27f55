"""The adds that a worker has written down for a round of a table, before they are made.

    line of worker w   … | ROUND, END | ROUND, END | …      8 bytes each
    an entry           the rows, the delta, a foot (whether it has rows, how many, number)

An entry counts as soon as END lies behind it. From then on it will be in the round, whatever dies
(own_part.py). A worker has two logs, one for odd rounds and one for even, because it may have come
to the end of a round that is not made yet, and add to the next one. What has been made is written
over.

A log is written with its lock held, by its worker, or by this host's server in its name. It has far
more addresses than it needs; memory is taken as adds come, and kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.errors import StateError
from phalanx.ipc import Regions, aligned
from phalanx.memory import copy_to
from phalanx.tables.part import Entry
from phalanx.tables.table_memory import LOGS, TableMemory

NUM_LOGS = 2
_ROUND, _END = range(2)
_FOOT_BYTES = 64
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 34  # addresses of a log, and four times the table's if these are more
_ROUND_BITS = 32  # more than a log has room for entries


class WorkerLog:
    """The log of one worker's odd or even rounds of one table, as one process sees it.

    Args:
        memory: The table's.
        worker: Whose log.
        which: 1 for odd rounds, 0 for even ones.
        regions: Where its memory comes from.
    """

    def __init__(self, memory: TableMemory, worker: int, which: int, regions: Regions) -> None:
        self._spec = spec = memory.spec
        self._worker = worker
        self._words = memory.worker(worker)[LOGS + 2 * which :]
        nbytes = max(_MOST_BYTES, 4 * spec.rows * memory.row_bytes)
        name = f"log-{worker}-{which}-{spec.name}"
        self._region = regions.open_region(name, nbytes, reserved=_FIRST_BYTES)
        self._reserved = _FIRST_BYTES

    def append(self, entry: Entry, number: int, applied: int) -> None:
        """Write an add down for round ``number``, where ``applied`` is the last that is made.

        One that comes again, as its number shows, is not written again.

        Raises:
            StateError: Adds of two open rounds are there already.
            OutOfSpace: There is no room for it.
        """
        words = self._words
        if words[_ROUND] != number:
            if words[_ROUND] > applied:
                raise StateError(
                    f"At most one round of a table must be open when worker {self._worker} adds to "
                    "the next, but two are. Wait for the gets of its other threads."
                )
            words[_END] = 0
            words[_ROUND] = number
        at = words[_END]
        if not (entry.number and at and entry.number <= self._foot(at)[2]):
            stop = at + _entry_bytes(entry)
            self._reserve(stop)
            self._write(at, stop, entry)
            words[_END] = stop  # from now on it counts

    def entries(self, number: int) -> list[Entry]:
        """Return the adds of a round, in order, over the log's own memory.

        Their numbers rise from round to round, also where one worker's number has been another's
        that had come further.
        """
        found = []
        stop = self._words[_END] if self._words[_ROUND] == number else 0
        while stop:
            found.append(self._read(stop))
            stop -= _entry_bytes(found[-1])
        return [e._replace(number=n) for n, e in enumerate(found[::-1], first_number(number))]

    def _foot(self, stop: int) -> memoryview:
        """Return the foot of the entry that ends at ``stop``."""
        return self._region.buffer[stop - _FOOT_BYTES : stop].cast("q")

    def _reserve(self, stop: int) -> None:
        """Have memory for so many bytes."""
        if stop > self._reserved:
            self._region.reserve_part(self._reserved, stop - self._reserved)
            self._reserved = stop

    def _write(self, at: int, stop: int, entry: Entry) -> None:
        region, (rows, delta, _, number) = self._region, entry
        if rows is not None:
            region.tensor(torch.int64, len(rows), at).copy_(rows)
            at += aligned(8 * len(rows))
        flat = delta.reshape(-1)
        copy_to(flat, region.tensor(delta.dtype, len(flat), at))
        foot = self._foot(stop)
        foot[0], foot[1], foot[2] = rows is not None, len(delta), number

    def _read(self, stop: int) -> Entry:
        has_rows, num_rows, number = self._foot(stop)[:3]
        region, spec = self._region, self._spec
        count = num_rows * spec.delta_cols
        at = stop - _FOOT_BYTES - aligned(count * spec.dtype.itemsize)
        delta = region.tensor(spec.dtype, count, at).view(num_rows, spec.delta_cols)
        rows: Tensor | None = None
        if has_rows:
            rows = region.tensor(torch.int64, num_rows, at - aligned(8 * num_rows))
        return Entry(rows, delta, self._worker, number)


def first_number(round_number: int) -> int:
    """Return the number of a round's first add, as its part knows it."""
    return (round_number << _ROUND_BITS) + 1


def _entry_bytes(entry: Entry) -> int:
    rows = 0 if entry.rows is None else 8 * len(entry.rows)
    return aligned(rows) + aligned(entry.delta.numel() * entry.delta.itemsize) + _FOOT_BYTES
