"""Bulk-synchronous tables: adds are logged, and applied round by round in the order of workers.

    worker 0   add add get·········┐                 its i-th get = arrival at round i
    worker 1   add get·····┐       │
    worker 2       add get │       │  all have arrived: the first to see it applies the adds of
               ────────────┴───────┴─ worker 0, then 1, then 2; then all read the same bits

The words are those of table_page.py. CLOCK is the last round at which the worker has arrived, in
this table; the clocks of membership.py count ticks.

A worker's adds stay in its own log until their round is applied. A dead worker loses no logged add:
the next round applies its log. Each worker has two logs, because it may have arrived at a round
that is not applied yet and log adds of the next one. A worker may die while it applies a round:
each shard counts the adds of the round it has (see shard.py), and the next worker resumes there. A
worker that joins meanwhile first finishes that round (TAKEN is ahead of APPLIED); otherwise its own
adds would reach only the shards that lack the round. A new worker with the number of a dead or
departed one inherits its line: the logged updates are applied, the arrival of the other incarnation
is discarded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import StateError
from phalanx.ipc import Mutex, Region, aligned, late_peers, wait_until
from phalanx.tables.membership import GAVE_UP_EARLIER, Membership
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.shard import Entry
from phalanx.tables.spec import TableSpec
from phalanx.tables.table_page import APPLIED, ARRIVED_AS, CLOCK, LOGS, TAKEN, TablePage

__all__ = ["Arrival", "RoundLog", "Rounds"]

_LOG_ROUND, _LOG_COUNT = range(2)
_NUM_LOGS = 2
_ALL, _ROWS, _VALUE, _NEXT_CHUNK, _ROW_VALUES = range(5)
_HEAD_BYTES = 64
_SMALLEST_CHUNK = 1 << 16
_MAX_ENTRIES = 1 << 20


class RoundLog:
    """The logged adds of one worker, in regions that double in size.

    An entry is a head (kind, how many rows, the add's number), the rows, the delta; each begins on
    64 bytes.

    Args:
        spec: The table.
        worker: Whose log.
        index: Which of its logs.
        line: The log's two words of the worker's line.
        regions: Where its regions come from.
    """

    def __init__(
        self,
        spec: TableSpec,
        worker: int,
        index: int,
        line: memoryview,
        regions: RunRegions,
    ) -> None:
        self._spec = spec
        self._worker = worker
        self._name = f"log-{worker}-{index}"
        self._line = line
        self._regions = regions
        whole = spec.rows * spec.cols * spec.dtype.itemsize
        self._first_chunk = aligned(max(_SMALLEST_CHUNK, whole + 4 * _HEAD_BYTES))
        self._chunks: list[Region] = []
        self._at = (0, 0)  # chunk and byte at which the next entry begins
        self._written = 0
        self._last_number = 0  # of the round's numbered adds

    @property
    def number(self) -> int:
        """The round whose adds it holds, or 0."""
        return self._line[_LOG_ROUND]

    def put(self, entry: Entry, number: int) -> None:
        """Log an add for round ``number``; it counts once the last word is written.

        Args:
            entry: The add. One with a number that is not larger than the last one's, of this
                round, is there already.
            number: The round.

        Raises:
            OutOfSpace: There is no room for it.
            StateError: There are too many in one round.
        """
        line = self._line
        if line[_LOG_ROUND] != number:
            line[_LOG_COUNT] = 0
            line[_LOG_ROUND] = number
        if self._written != line[_LOG_COUNT]:
            self._find_end(line[_LOG_COUNT])
        if 0 < entry.number <= self._last_number:
            return
        if self._written >= _MAX_ENTRIES:
            raise StateError(
                f"A round of table {self._spec.name!r} must have at most {_MAX_ENTRIES} adds of a "
                "worker, but has more. Call `get` to end the round."
            )
        chunk, at = self._room_for(self._entry_bytes(entry))
        self._write(self._chunk(chunk), at, entry)
        self._at = chunk, at + self._entry_bytes(entry)
        self._written += 1
        self._last_number = max(self._last_number, entry.number)
        line[_LOG_COUNT] = self._written

    def entries(self, number: int) -> list[Entry]:
        """Return the adds of round ``number``, over the log's own memory."""
        if self._line[_LOG_ROUND] != number:
            return []
        return [entry for entry, _ in self._walk(self._line[_LOG_COUNT])]

    def _find_end(self, count: int) -> None:
        """Find the end of the log: its start after a round, or where a dead worker stopped."""
        self._at, self._last_number = (0, 0), 0
        for entry, end in self._walk(count):
            self._at, self._last_number = end, max(self._last_number, entry.number)
        self._written = count

    def _walk(self, count: int) -> Iterator[tuple[Entry, tuple[int, int]]]:
        """Yield the first ``count`` entries, each with the chunk and byte at which it ends."""
        chunk, at = 0, 0
        for _ in range(count):
            while self._head(chunk, at)[0] == _NEXT_CHUNK:
                chunk, at = chunk + 1, 0
            entry = self._read(chunk, at)
            at += self._entry_bytes(entry)
            yield entry, (chunk, at)

    def _room_for(self, nbytes: int) -> tuple[int, int]:
        chunk, at = self._at
        while at + nbytes + _HEAD_BYTES > self._chunk(chunk).nbytes:  # a head marks the end
            self._chunk(chunk + 1)  # fails for want of memory before anything is said
            self._head(chunk, at)[0] = _NEXT_CHUNK
            chunk, at = chunk + 1, 0
        return chunk, at

    def _chunk(self, index: int) -> Region:
        while len(self._chunks) <= index:
            k = len(self._chunks)
            name = f"{self._name}-{k}-{self._spec.name}"
            self._chunks.append(self._regions.open_region(name, self._first_chunk << k))
        return self._chunks[index]

    def _head(self, chunk: int, at: int) -> memoryview:
        return self._chunk(chunk).buffer[at : at + _HEAD_BYTES].cast("q")

    def _entry_bytes(self, entry: Entry) -> int:
        rows = 0 if entry.rows is None else 8 * len(entry.rows)
        return _HEAD_BYTES + aligned(rows) + aligned(entry.delta.numel() * entry.delta.itemsize)

    def _write(self, region: Region, at: int, entry: Entry) -> None:
        head = region.buffer[at : at + _HEAD_BYTES].cast("q")
        kinds = (_ALL, _VALUE) if entry.rows is None else (_ROWS, _ROW_VALUES)
        head[0] = kinds[entry.assigns]
        head[1] = 0 if entry.rows is None else len(entry.rows)
        head[2] = entry.number
        at += _HEAD_BYTES
        if entry.rows is not None:
            region.tensor(torch.int64, len(entry.rows), at).copy_(entry.rows)
            at += aligned(8 * len(entry.rows))
        flat = entry.delta.reshape(-1)
        region.tensor(self._spec.dtype, len(flat), at).copy_(flat)

    def _read(self, chunk: int, at: int) -> Entry:
        kind, num_rows, number = self._head(chunk, at)[:3]
        region, spec = self._chunk(chunk), self._spec
        at += _HEAD_BYTES
        rows: Tensor | None = None
        if kind in (_ROWS, _ROW_VALUES):
            rows = region.tensor(torch.int64, num_rows, at)
            at += aligned(8 * num_rows)
        num_rows = spec.rows if rows is None else num_rows
        delta = region.tensor(spec.dtype, num_rows * spec.cols, at).view(num_rows, spec.cols)
        assigns = kind in (_VALUE, _ROW_VALUES)
        return Entry(rows, delta, self._worker, assigns, number=number)


class Arrival(NamedTuple):
    """A worker that has come to a round and not gone on yet."""

    worker: int
    number: int
    incarnation: int


class Rounds:
    """The rounds of one bulk-synchronous table, as one process sees them.

    Args:
        spec: The table.
        page: The table's.
        lock: Held to take a round in.
        membership: The workers that must arrive.
        regions: Where logs lie.
        take_in: Takes the entries of a round, in order; called with the lock held.
    """

    def __init__(
        self,
        *,
        spec: TableSpec,
        page: TablePage,
        lock: Mutex,
        membership: Membership,
        regions: RunRegions,
        take_in: Callable[[int, list[Entry], float], None],
    ) -> None:
        self._spec = spec
        self._page = page
        self._line = page.table
        self._lock = lock
        self._membership = membership
        self._regions = regions
        self._take_in = take_in
        self._logs: dict[tuple[int, int], RoundLog] = {}
        self._mutex = threading.Lock()  # threads may share a worker, and so its log

    def _log(self, worker: int, index: int) -> RoundLog:
        log = self._logs.get((worker, index))
        if log is None:
            start = LOGS + 2 * index
            words = self._page.worker(worker)[start : start + 2]
            log = RoundLog(self._spec, worker, index, words, self._regions)
            self._logs[worker, index] = log
        return log

    def _log_for(self, worker: int, number: int) -> RoundLog:
        """Return the log with adds of the round, else one whose round is applied."""
        logs = [self._log(worker, index) for index in range(_NUM_LOGS)]
        for log in logs:
            if log.number == number:
                return log
        for log in logs:
            if log.number <= self._line[APPLIED]:
                return log
        raise StateError(
            f"At most one round of table {self._spec.name!r} must be open when worker {worker} "
            "adds to the next, but two are. Call `wait()` on its earlier gets."
        )

    def enter(self, worker: int, timeout_s: float) -> None:
        """Begin with the round that is open now."""
        with self._lock.held(timeout_s):
            if self._line[TAKEN] > self._line[APPLIED]:
                self._take(self._line[TAKEN], timeout_s)
            with self._mutex:
                for index in range(_NUM_LOGS):  # another process may have written on in them
                    self._logs.pop((worker, index), None)
            line = self._page.worker(worker)
            line[CLOCK] = self._line[APPLIED]
            # last: from now on the clock counts
            line[ARRIVED_AS] = self._membership.incarnation(worker)

    def put(self, entry: Entry) -> None:
        """Log an add for its worker's round."""
        with self._mutex:  # no other thread of the worker arrives meanwhile
            number = self.clock_of(entry.worker) + 1
            self._log_for(entry.worker, number).put(entry, number)

    def put_into(self, entry: Entry, number: int) -> None:
        """Log an add for round ``number``, at which its worker has not arrived.

        One that comes again may be there already, and its round be in.
        """
        with self._mutex:
            if number > self._line[APPLIED]:
                self._log_for(entry.worker, number).put(entry, number)

    def clock_of(self, worker: int) -> int:
        """Return the last round that ``worker`` has arrived at."""
        return self._page.worker(worker)[CLOCK]

    def arrive(self, worker: int) -> Arrival:
        """Say that ``worker`` has logged all adds of its round."""
        line = self._page.worker(worker)
        with self._mutex:
            line[ARRIVED_AS] = abs(line[ARRIVED_AS])
            line[CLOCK] += 1
            return Arrival(worker, line[CLOCK], line[ARRIVED_AS])

    def arrive_at(self, worker: int, number: int) -> Arrival:
        """Say that ``worker`` has logged all adds of round ``number``, and of those before."""
        line = self._page.worker(worker)
        with self._mutex:
            line[ARRIVED_AS] = abs(line[ARRIVED_AS])
            line[CLOCK] = max(line[CLOCK], number)
            return Arrival(worker, number, line[ARRIVED_AS])

    def finish(self, arrival: Arrival, timeout_s: float) -> None:
        """Wait until the round is in; apply it if everybody has arrived.

        An arrival that was taken back counts again.

        Raises:
            PeerTimeout: Somebody stayed away; ``.rank`` is the first. The arrival is taken back,
                unless the worker has arrived at a later round, too.
        """
        number, line = arrival.number, self._page.worker(arrival.worker)
        with self._mutex:
            if line[CLOCK] < number and self._is_its_own(arrival):
                line[ARRIVED_AS] = arrival.incarnation
                line[CLOCK] = number

        def ready() -> bool:
            if self._line[APPLIED] < number and self._has_all(number):
                self._apply(number, timeout_s)
            return self._line[APPLIED] >= number

        def look() -> None:
            self._membership.look_for_dead(timeout_s)

        if not wait_until(ready, timeout_s, look):
            self._give_up(arrival, timeout_s)

    def _has_all(self, number: int) -> bool:
        """Tell whether all have arrived, by a look at no more workers than it takes."""
        return all(self._has(worker, number) for worker in self._membership.awaited())

    def _missing(self, number: int) -> list[int]:
        return [each for each in self._membership.awaited() if not self._has(each, number)]

    def _has(self, worker: int, number: int) -> bool:
        line = self._page.worker(worker)
        arrived_as = self._membership.incarnation(worker)
        return line[CLOCK] >= number and abs(line[ARRIVED_AS]) == arrived_as

    def _has_given_up(self, worker: int, number: int) -> bool:
        """Tell whether a worker had come to a round, and given it up at its deadline."""
        line, arrived_as = self._page.worker(worker), self._membership.incarnation(worker)
        return line[CLOCK] == number - 1 and line[ARRIVED_AS] == -arrived_as

    def _is_its_own(self, arrival: Arrival) -> bool:
        """Tell whether the line still belongs to this worker, not to a later one of its number."""
        return abs(self._page.worker(arrival.worker)[ARRIVED_AS]) == arrival.incarnation

    def _apply(self, number: int, timeout_s: float) -> None:
        """Apply all rounds up to ``number``; an abandoned get leaves its round open."""
        with self._lock.held(timeout_s):
            # again: the round may be applied, an arrival withdrawn, or a worker new
            if not self._has_all(number):
                return
            for each in range(self._line[APPLIED] + 1, number + 1):
                self._take(each, timeout_s)

    def _take(self, number: int, timeout_s: float) -> None:
        """Apply the logged adds of a round. The lock is held."""
        rounds = [self._page.of_workers(LOGS + 2 * index) for index in range(_NUM_LOGS)]
        entries = [
            entry
            for worker, numbers in enumerate(zip(*rounds, strict=True))
            for index in range(_NUM_LOGS)
            if numbers[index] == number
            for entry in self._log(worker, index).entries(number)
        ]
        self._line[TAKEN] = number
        self._take_in(number, entries, timeout_s)
        self._line[APPLIED] = number

    def _give_up(self, arrival: Arrival, timeout_s: float) -> None:
        worker, number, _ = arrival
        with self._lock.held(timeout_s):
            missing = self._missing(number)
            if self._line[APPLIED] < number and missing:
                line = self._page.worker(worker)
                with self._mutex:
                    if line[CLOCK] == number and self._is_its_own(arrival):
                        line[CLOCK] = number - 1
                        line[ARRIVED_AS] = -arrival.incarnation
                away = [each for each in missing if not self._has_given_up(each, number)]
                rule = "In a bulk-synchronous table all workers make the same gets, or leave."
                raise late_peers(
                    "Worker",
                    away or missing,
                    self._membership.num_workers(),
                    f"get {number} of table {self._spec.name!r}",
                    timeout_s,
                    more=rule if away else GAVE_UP_EARLIER,
                )
        self._apply(number, timeout_s)  # the last one came just now
