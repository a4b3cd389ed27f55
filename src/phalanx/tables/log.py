"""The adds that a worker has written down for a table before they are made.

An add that has more rows than one block, or rows in several parts, or that waits for the end of its
round, is first written to its worker's log. It counts as soon as one word says so. From then on it
will be whole, in all parts of this host, whoever dies: whoever finds it unfinished makes the rest
(part.py, rounds.py). What is in all parts is written over.

    line of worker w   … | NUMBER | TAIL | FINISHED | ROUND, COUNT | ROUND, COUNT | …
    an entry           a head (kind, how many rows, number, target), the rows, the delta

    NUMBER     the last number that was given to an add
    TAIL       the last add that counts, of a table without rounds
    FINISHED   the last add that is in all parts; where the log may hold others, its byte UNFINISHED
               is set, which each get and add looks at
    COUNT      how many adds of ROUND count, of a table with rounds

# Note [Who writes]
A log is written with its lock held, by its worker, or by this host's server in its name. Whoever
makes the rest of a dead worker's adds holds the lock, too, so nobody writes over what it reads. In
a table without rounds at most one call's adds are unfinished, so each begins at the log's start.

A worker has two logs, because it may have come to the end of a round that is not made yet, and add
to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import Mutex, Region, aligned
from phalanx.memory import copy_finite_to, copy_to
from phalanx.tables.part import Entry, NotFinite
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec
from phalanx.tables.table_memory import (
    FINISHED,
    LOGGED_AS,
    LOGS,
    NUMBER,
    RESTORED,
    TAIL,
    TableMemory,
)

__all__ = ["WorkerLog"]

_ROUND, _COUNT = range(2)
_NUM_CHAPTERS = 2
_ALL, _ROWS, _VALUE, _NEXT_CHUNK, _ROW_VALUES = range(5)
_HEAD_BYTES = 64
_SMALLEST_CHUNK = 1 << 16
_ROUND_BITS = 21
_MAX_ENTRIES = 1 << 20  # of a round, which leaves their numbers room


class WorkerLog:
    """The log of one worker for one table, as one process sees it.

    Args:
        memory: The table's.
        worker: Whose log.
        lock: Held to write.
        regions: Where its memory comes from.
    """

    def __init__(self, memory: TableMemory, worker: int, lock: Mutex, regions: RunRegions) -> None:
        spec = memory.spec
        self.lock = lock
        self._line = line = memory.worker(worker)
        self._unfinished = memory.unfinished[worker : worker + 1]
        self._has_rounds = spec.staleness.is_bulk_synchronous and worker != RESTORED
        self._chapters = [
            _Chapter(spec, worker, index, line[LOGS + 2 * index : LOGS + 2 * index + 2], regions)
            for index in range(_NUM_CHAPTERS)
        ]

    # --- a table without rounds -------------------------------------------------------------------

    def append(
        self,
        entries: Sequence[Entry],
        incarnation: int,
        make: Callable[[Entry], None],
        has_begun: Callable[[Entry], bool],
    ) -> None:
        """Write adds down, and make them; those that have been asked for before, not again.

        Args:
            entries: Of this worker. One without a number gets the next one.
            incarnation: Of this worker.
            make: Makes an add that counts, in all parts; does nothing in those that have it.
            has_begun: Tells whether an add is in any part.

        The lock is held. Where a part cannot be had in time, and no other has changed, the adds do
        not count any more. What ``make`` raises leaves the add finished: the parts that raised are
        as they were.

        Raises:
            NotFinite: An entry was unchecked, and is not; none of them counts.
        """
        line, chapter = self._line, self._chapters[0]
        self.finish(make)
        line[LOGGED_AS] = incarnation
        numbered = [self._numbered(entry) for entry in entries]
        numbered = [entry for entry in numbered if entry.number > line[FINISHED]]
        if numbered:
            chapter.begin(0)
            for entry in numbered:
                chapter.put(entry)
            self._unfinished[0] = 1
            line[TAIL] = numbered[-1].number
            try:
                self.finish(make)
            except PeerTimeout:
                if not has_begun(numbered[0]):
                    line[TAIL] = line[FINISHED]
                    self._unfinished[0] = 0
                raise

    def finish(self, make: Callable[[Entry], None]) -> None:
        """Make what counts and is not in all parts. The lock is held."""
        line, failed = self._line, None
        entries = () if self.is_finished() else self._chapters[0].entries(0)
        for entry in entries:
            if line[FINISHED] < entry.number <= line[TAIL]:
                try:
                    make(entry)
                except PeerTimeout:  # the part may still take it
                    raise
                except Exception as exc:  # in a part that is as it was
                    failed = failed or exc
        line[FINISHED] = line[TAIL]
        self._unfinished[0] = 0
        if failed is not None:
            raise failed

    @property
    def incarnation(self) -> int:
        """Which of those who have had the worker's number wrote the log."""
        return self._line[LOGGED_AS]

    def is_finished(self) -> bool:
        """Tell whether all that counts is in all parts."""
        return self._line[FINISHED] >= self._line[TAIL]

    def _numbered(self, entry: Entry) -> Entry:
        """Give an add the next number, unless it has one; the lock is held."""
        line = self._line
        if not entry.number:
            entry = entry._replace(number=line[NUMBER] + 1)
        line[NUMBER] = max(line[NUMBER], entry.number)
        return entry

    # --- a table with rounds ----------------------------------------------------------------------

    def append_to_round(self, entry: Entry, number: int, applied: int) -> None:
        """Write an add down for round ``number``, where ``applied`` is the last that is made.

        Raises:
            NotFinite: The entry was unchecked, and is not.
            StateError: Adds of two open rounds are there already, or too many of one.
            OutOfSpace: There is no room for it.
        """
        chapter = self._chapter_of(number)
        if chapter is None:
            chapter = next((c for c in self._chapters if c.round <= applied), None)
            if chapter is None:
                raise StateError(
                    f"At most one round of a table must be open when worker {entry.worker} adds to "
                    "the next, but two are. Call `wait()` on its earlier gets."
                )
            chapter.begin(number)
        chapter.put(self._numbered(entry))

    def entries_of_round(self, number: int) -> list[Entry]:
        """Return the adds of a round, in order, over the log's own memory.

        Their numbers rise from round to round, also where one worker's number has been another's
        that had come further.
        """
        chapter = self._chapter_of(number)
        if chapter is None:
            return []
        first = (number << _ROUND_BITS) + 1
        return [e._replace(number=n) for n, e in enumerate(chapter.entries(number), first)]

    def _chapter_of(self, number: int) -> _Chapter | None:
        return next((c for c in self._chapters if c.round == number), None)

    def find(self, number: int) -> Entry:
        """Return an add that counts, by its number."""
        if self._has_rounds:
            return next(
                e for e in self.entries_of_round(number >> _ROUND_BITS) if e.number == number
            )
        return next(e for e in self._chapters[0].entries(0) if e.number == number)


class _Chapter:
    """One of a worker's logs, in regions that double in size."""

    def __init__(
        self, spec: TableSpec, worker: int, index: int, words: memoryview, regions: RunRegions
    ) -> None:
        self._spec = spec
        self._worker = worker
        self._name = f"log-{worker}-{index}"
        self._words = words
        self._regions = regions
        self._chunks: dict[int, Region] = {}
        self._at = (0, 0)  # chunk and byte at which the next entry begins
        self._written = 0
        self._last_number = 0

    @property
    def round(self) -> int:
        """The round whose adds it holds; 0 of a table without rounds."""
        return self._words[_ROUND]

    def begin(self, number: int) -> None:
        """Begin at the start, for adds of round ``number``."""
        self._words[_COUNT] = 0
        self._words[_ROUND] = number

    def put(self, entry: Entry) -> None:
        """Write an entry; it counts once COUNT says so. One that is there is not written again."""
        words = self._words
        if self._written != words[_COUNT] or not words[_COUNT]:
            self._find_end(words[_COUNT])
        if entry.number <= self._last_number:
            return
        if self._written >= _MAX_ENTRIES:
            raise StateError(
                f"A round of table {self._spec.name!r} must have at most {_MAX_ENTRIES} adds of a "
                "worker, but has more. Call `get` to end the round."
            )
        chunk, at = self._room_for(_entry_bytes(entry))
        self._write(self._chunk(chunk), at, entry)
        self._at = chunk, at + _entry_bytes(entry)
        self._written += 1
        self._last_number = entry.number
        words[_COUNT] = self._written

    def entries(self, number: int) -> Iterator[Entry]:
        """Yield the entries of round ``number``, over the log's own memory."""
        if self._words[_ROUND] == number:
            for entry, _ in self._walk(self._words[_COUNT]):
                yield entry

    def _find_end(self, count: int) -> None:
        """Find the end of the log: its start, or where another process stopped."""
        self._at, self._last_number = (0, 0), 0
        for entry, end in self._walk(count):
            self._at, self._last_number = end, entry.number
        self._written = count

    def _walk(self, count: int) -> Iterator[tuple[Entry, tuple[int, int]]]:
        """Yield the first ``count`` entries, each with the chunk and byte at which it ends."""
        chunk, at = 0, 0
        for _ in range(count):
            head = self._head(chunk, at)
            if head[0] == _NEXT_CHUNK:
                chunk, at = head[1], 0
            entry = self._read(chunk, at)
            at += _entry_bytes(entry)
            yield entry, (chunk, at)

    def _room_for(self, nbytes: int) -> tuple[int, int]:
        chunk, at = self._at
        if at + nbytes + _HEAD_BYTES <= self._chunk(chunk).nbytes:  # a head marks the end
            return chunk, at
        following = chunk + 1
        while _SMALLEST_CHUNK << following < nbytes + _HEAD_BYTES:
            following += 1
        self._chunk(following)  # fails for want of memory before anything is said
        head = self._head(chunk, at)
        head[0], head[1] = _NEXT_CHUNK, following
        return following, 0

    def _chunk(self, index: int) -> Region:
        if index not in self._chunks:
            name = f"{self._name}-{index}-{self._spec.name}"
            self._chunks[index] = self._regions.open_region(name, _SMALLEST_CHUNK << index)
        return self._chunks[index]

    def _head(self, chunk: int, at: int) -> memoryview:
        return self._chunk(chunk).buffer[at : at + _HEAD_BYTES].cast("q")

    def _write(self, region: Region, at: int, entry: Entry) -> None:
        head = region.buffer[at : at + _HEAD_BYTES].cast("q")
        kinds = (_ALL, _VALUE) if entry.rows is None else (_ROWS, _ROW_VALUES)
        head[0] = kinds[entry.assigns]
        head[1] = len(entry.delta)
        head[2] = entry.number
        head[3] = entry.target
        at += _HEAD_BYTES
        if entry.rows is not None:
            region.tensor(torch.int64, len(entry.rows), at).copy_(entry.rows)
            at += aligned(8 * len(entry.rows))
        flat = entry.delta.reshape(-1)
        target = region.tensor(entry.delta.dtype, len(flat), at)
        if not entry.unchecked:
            copy_to(flat, target)
        elif not copy_finite_to(flat, target):
            raise NotFinite

    def _read(self, chunk: int, at: int) -> Entry:
        kind, num_rows, number, target = self._head(chunk, at)[:4]
        region, spec = self._chunk(chunk), self._spec
        at += _HEAD_BYTES
        rows: Tensor | None = None
        if kind in (_ROWS, _ROW_VALUES):
            rows = region.tensor(torch.int64, num_rows, at)
            at += aligned(8 * num_rows)
        assigns = kind in (_VALUE, _ROW_VALUES)
        dtype, cols = spec.columns[target]
        if not assigns:
            cols = spec.entry_cols(assigns)
        delta = region.tensor(dtype, num_rows * cols, at).view(num_rows, cols)
        return Entry(rows, delta, self._worker, assigns, number=number, target=target)


def _entry_bytes(entry: Entry) -> int:
    rows = 0 if entry.rows is None else 8 * len(entry.rows)
    return _HEAD_BYTES + aligned(rows) + aligned(entry.delta.numel() * entry.delta.itemsize)
