"""The adds that a worker has written down for a table before they are made.

An add that has more rows than one block, or that waits for the end of its round, is first written
to its worker's log. It counts as soon as one word says so. From then on it will be whole, whoever
dies: whoever finds it unfinished makes the rest (part.py, rounds.py). What is in is written over.

    line of worker w   … | NUMBER | TAIL | FINISHED | ROUND, END | ROUND, END | …
    an entry           a head (kind, how many rows, number), the rows, the delta

    NUMBER     the last number that was given to an add
    TAIL       the last add that counts, of a table without rounds
    FINISHED   the last add that is in; where the log may hold others, its byte UNFINISHED
               is set, which each get and add looks at
    END        where the adds of ROUND end, of a table with rounds, and how many they are

# Note [Who writes]
A log is written with its lock held, by its worker, or by this host's server in its name. Whoever
makes the rest of a dead worker's adds holds the lock, too, so nobody writes over what it reads. In
a table without rounds at most one call's adds are unfinished, so each begins at the log's start.

A log has far more addresses than it needs; memory is taken as adds come, and kept. A worker has two
logs, because it may have come to the end of a round that is not made yet, and add
to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from phalanx.errors import OutOfSpace, PeerTimeout, StateError
from phalanx.ipc import Mutex, Region, aligned
from phalanx.memory import copy_finite_to, copy_to
from phalanx.tables.part import Entry, NotFinite
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.table_memory import FINISHED, LOGGED_AS, LOGS, NUMBER, TAIL, TableMemory

_ROUND, _END = range(2)
_NUM_CHAPTERS = 2
_HAS_ROWS, _ASSIGNS = 1, 2  # bits of an entry's kind
_HEAD_BYTES = 64
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 34  # addresses of a log, and four times the table's if these are more
_END_BITS = 42  # of the word END, below the number of entries
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
        self._has_rounds = spec.staleness.is_bulk_synchronous
        self._chapters = [
            _Chapter(memory, worker, index, line[LOGS + 2 * index : LOGS + 2 * index + 2], regions)
            for index in range(_NUM_CHAPTERS)
        ]

    # --- a table without rounds -------------------------------------------------------------------

    def append(
        self,
        entry: Entry | None,
        incarnation: int,
        make: Callable[[Entry], None],
    ) -> None:
        """Write an add down, and make it, unless it has been asked for before.

        Args:
            entry: Of this worker. One without a number gets the next one. None only makes what the
                log holds.
            incarnation: Of this worker.
            make: Makes an add that counts, unless it is made.

        The lock is held. Where the part cannot be had in time, the add does not count any more.
        What else ``make`` raises leaves the add finished, and the part as it was.

        Raises:
            NotFinite: The entry was unchecked, and is not.
        """
        line, chapter = self._line, self._chapters[0]
        self.finish(make)
        line[LOGGED_AS] = incarnation
        entry = entry and self._numbered(entry)
        if entry is None or entry.number <= line[FINISHED]:
            return
        chapter.begin(0)
        chapter.put(entry)
        self._unfinished[0] = 1
        line[TAIL] = entry.number
        try:
            self.finish(make)
        except PeerTimeout:
            line[TAIL] = line[FINISHED]
            self._unfinished[0] = 0
            raise

    def finish(self, make: Callable[[Entry], None]) -> None:
        """Make what counts and is not in. The lock is held."""
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
        """Tell whether all that counts is in."""
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
    """One of a worker's logs: entries end to end."""

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
        self._last = (0, 0)  # the word END that this process knows, and the last number before it

    @cached_property
    def _region(self) -> Region:
        nbytes = max(_MOST_BYTES, 4 * self._spec.rows * self._memory.row_bytes)
        return self._regions.open_region(self._name, nbytes, reserved=_FIRST_BYTES)

    @property
    def round(self) -> int:
        """The round whose adds it holds; 0 of a table without rounds."""
        return self._words[_ROUND]

    def begin(self, number: int) -> None:
        """Begin at the start, for adds of round ``number``."""
        self._words[_END] = 0
        self._words[_ROUND] = number

    def put(self, entry: Entry) -> None:
        """Write an entry; it counts once END says so. One that is there is not written again."""
        word = self._words[_END]
        count, at = word >> _END_BITS, word & ((1 << _END_BITS) - 1)
        if self._last[0] != word or not word:  # another process has written, or nobody yet
            self._last = word, max((e.number for e in self.entries(self.round)), default=0)
        if entry.number <= self._last[1]:
            return
        if count >= _MAX_ENTRIES:
            raise StateError(
                f"A round of table {self._spec.name!r} must have at most {_MAX_ENTRIES} adds of a "
                "worker, but has more. Call `get` to end the round."
            )
        end = at + _entry_bytes(entry)
        self._reserve(end)
        self._write(at, entry)
        self._words[_END] = word = (count + 1) << _END_BITS | end
        self._last = word, entry.number

    def entries(self, number: int) -> Iterator[Entry]:
        """Yield the entries of round ``number``, over the log's own memory."""
        at, end = 0, self._words[_END] & ((1 << _END_BITS) - 1)
        while self.round == number and at < end:
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
        head[0] = _HAS_ROWS * (entry.rows is not None) | _ASSIGNS * entry.assigns
        head[1] = len(entry.delta)
        head[2] = entry.number
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

    def _read(self, at: int) -> Entry:
        kind, num_rows, number = self._head(at)[:3]
        region, spec = self._region, self._spec
        at += _HEAD_BYTES
        rows: Tensor | None = None
        if kind & _HAS_ROWS:
            rows = region.tensor(torch.int64, num_rows, at)
            at += aligned(8 * num_rows)
        assigns = bool(kind & _ASSIGNS)
        cols = spec.entry_cols(assigns)
        delta = region.tensor(spec.dtype, num_rows * cols, at).view(num_rows, cols)
        return Entry(rows, delta, self._worker, assigns, number=number)


def _entry_bytes(entry: Entry) -> int:
    rows = 0 if entry.rows is None else 8 * len(entry.rows)
    return _HEAD_BYTES + aligned(rows) + aligned(entry.delta.numel() * entry.delta.itemsize)
