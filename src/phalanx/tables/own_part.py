"""The part of a table on this host, and the rounds of a bulk-synchronous one.

In a bulk-synchronous table adds are logged, and applied round by round in the order of workers:

    worker 0   add add get·········┐                 its i-th get = arrival at round i
    worker 1   add get·····┐       │
    worker 2       add get │       │  all have arrived: the first to see it applies the adds of
               ────────────┴───────┴─ workers 0, 1, 2 in this order: all read equal bits

The words are those of table_memory.py. CLOCK is the last round at which the worker has arrived, in
this table; the clocks of membership.py count ticks.

A worker's adds stay in its own log (log.py) until their round is applied. A dead worker loses no
logged add: the next round applies its log. A worker may die while it applies a round: the part
knows which adds it has (part.py), and the next worker resumes there. A worker that joins meanwhile
first finishes that round (TAKEN is ahead of APPLIED); otherwise its own adds would be missing in a
round that has been merged. A new worker with the number of a dead or
departed one inherits its line: the logged updates are applied, the arrival of the other incarnation
is discarded. A worker whose get ends at the deadline has arrived all the same; its next get is the
same one.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from phalanx.errors import PeerTimeout
from phalanx.ipc import Regions, Waiting
from phalanx.tables.keys import KeyPart
from phalanx.tables.log import NUM_LOGS, WorkerLog, first_number
from phalanx.tables.membership import Membership
from phalanx.tables.part import Entry, TablePart
from phalanx.tables.spec import TableSpec
from phalanx.tables.table_memory import (
    APPLIED,
    ARRIVED_AS,
    CLOCK,
    LOGS,
    MERGED,
    READY,
    TAKEN,
    TableMemory,
)


class OwnPart:
    """This host's part of a table, as one process sees it.

    Args:
        spec: The table that this host's rows are.
        regions: Where its memory comes from.
        membership: The workers of the run.

    Attributes:
        spec: As given.
        part: The rows.
        memory: The memory that processes share.
    """

    def __init__(self, spec: TableSpec, regions: Regions, membership: Membership) -> None:
        self.spec = spec
        self.memory = memory = TableMemory(spec, regions, membership.worker_of)
        self.part = (KeyPart if spec.has_keys else TablePart)(memory)
        self._line = memory.table
        self._membership = membership
        self._regions = regions
        self._logs: dict[tuple[int, int], WorkerLog] = {}

    def open(self, worker: int, init: Tensor | None, timeout_s: float) -> bool:
        """Fill the part as the master, or wait until the master has; then begin as ``worker``.

        Returns:
            Whether it is open; False where ``worker`` must fill it and ``init`` is None.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        line, membership = self._line, self._membership

        def ready() -> bool:
            if line[READY]:
                return True
            if min(membership.awaited(), default=worker) != worker:
                return False
            if init is not None:
                with self.memory.lock.held(timeout_s):
                    if not line[READY]:
                        self.part.begin(init)
                        line[READY] = 1
                        membership.changes.tell()
            return True

        look = partial(membership.look_for_dead, timeout_s)
        if not membership.changes.wait_until(ready, timeout_s, look):
            master = min(membership.awaited())
            raise PeerTimeout(
                f"Worker {master}, the master, did not open table {self.spec.name!r} within "
                f"{timeout_s:g} s.",
                master,
            )
        if not line[READY]:
            return False
        if self.spec.staleness == 0:
            self._enter_rounds(worker, timeout_s)
        return True

    # --- rounds -----------------------------------------------------------------------------------

    def _log_of(self, worker: int, number: int) -> WorkerLog:
        """Return the log of a worker that holds its adds of round ``number``."""
        key = worker, number % NUM_LOGS
        if key not in self._logs:
            self._logs[key] = WorkerLog(self.memory, *key, self._regions)
        return self._logs[key]

    def _enter_rounds(self, worker: int, timeout_s: float) -> None:
        """Begin with the round that is open now, unless the worker has begun already."""
        line, incarnation = self.memory.worker(worker), self._membership.incarnation(worker)
        if line[ARRIVED_AS] == incarnation:
            return
        with self.memory.lock.held(timeout_s):
            if self._line[TAKEN] > self._line[APPLIED]:
                self._take(self._line[TAKEN], timeout_s)
            line[CLOCK] = self._line[APPLIED]
            line[ARRIVED_AS] = incarnation  # last: from now on the clock counts

    def put(self, entry: Entry, timeout_s: float, number: int) -> None:
        """Log an add for round ``number`` of its worker.

        One that comes again may be there already, and its round be in.
        """
        with self.memory.lock_of_log(entry.worker).held(timeout_s):
            if number > (applied := self._line[APPLIED]):
                self._log_of(entry.worker, number).append(entry, number, applied)

    def clock_of(self, worker: int) -> int:
        """Return the last round that ``worker`` has arrived at."""
        return self.memory.worker(worker)[CLOCK]

    def arrive(self, worker: int, number: int) -> None:
        """Say that ``worker`` has logged all adds of all rounds up to ``number``."""
        line = self.memory.worker(worker)
        if number > line[CLOCK]:
            line[CLOCK] = number
        self._membership.changes.tell()

    def finish(self, number: int, timeout_s: float) -> None:
        """Wait until a round is in; apply it if everybody has arrived.

        Raises:
            PeerTimeout: Somebody stayed away; ``.rank`` is the first.
        """

        def ready() -> bool:
            if self._line[APPLIED] < number and self._has_all(number):
                self._apply(number, timeout_s)
            return self._line[APPLIED] >= number

        self._membership.wait_until(
            ready,
            timeout_s,
            f"get {number} of table {self.spec.name!r}",
            lambda worker: self._has(worker, number),
            "In a bulk-synchronous table all workers make the same gets, or close.",
        )

    def _has_all(self, number: int) -> bool:
        """Tell whether all have arrived, by a look at no more workers than it takes."""
        return all(self._has(worker, number) for worker in self._membership.awaited())

    def _has(self, worker: int, number: int) -> bool:
        line = self.memory.worker(worker)
        arrived_as = self._membership.incarnation(worker)
        return line[CLOCK] >= number and line[ARRIVED_AS] == arrived_as

    def _apply(self, number: int, timeout_s: float) -> None:
        """Apply all rounds up to ``number``; an interrupted get leaves its round open."""
        with self.memory.lock.held(timeout_s):
            # again: the round may be applied, or a worker new
            if not self._has_all(number):
                return
            for each in range(self._line[APPLIED] + 1, number + 1):
                self._take(each, timeout_s)

    def _take(self, number: int, timeout_s: float) -> None:
        """Apply the logged adds of a round. The lock is held."""
        waiting = Waiting(timeout_s)
        self._line[TAKEN] = number
        for entry in self._merged(self._entries(number), number):
            self.part.add(entry, waiting.remaining_s())
        self._line[APPLIED] = number
        self._membership.changes.tell()

    def _entries(self, number: int) -> list[Entry]:
        rounds = self.memory.of_workers(LOGS + 2 * (number % NUM_LOGS))
        return [
            entry
            for worker, each in enumerate(rounds)
            if each == number
            for entry in self._log_of(worker, number).entries(number)
        ]

    def _merged(self, entries: list[Entry], number: int) -> list[Entry]:
        """Make one add of a round's, in their order, where the updater wants it so."""
        if (
            self.spec.updater.merge is None
            or not entries
            or any(entry.rows is not None for entry in entries)
        ):
            return entries
        merged = entries[0].delta.clone()
        for entry in entries[1:]:
            merged.add_(entry.delta)
        if self.spec.updater.merge == "mean":
            merged.div_(len(entries))
        return [Entry(None, merged, MERGED, number=first_number(number))]
