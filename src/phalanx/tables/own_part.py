"""The part of a table on this host, and the logs from which its large adds and rounds are made."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from phalanx.errors import PeerTimeout
from phalanx.ipc import Waiting
from phalanx.tables.cut import Cut, part_of
from phalanx.tables.keys import KeyPart
from phalanx.tables.log import WorkerLog
from phalanx.tables.membership import Membership
from phalanx.tables.part import Entry, TablePart
from phalanx.tables.rounds import Rounds
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec
from phalanx.tables.table_memory import MERGED, NUM_LOGS, READY, TableMemory
from phalanx.tables.values import outside

ALL_FINISHED = bytes(NUM_LOGS)
"""The bytes UNFINISHED where no log holds an add that is not in."""


class OwnPart:
    """This host's part of a table.

    Args:
        spec: The table, of all hosts.
        regions: Where its memory comes from.
        membership: The workers of the run.
        host: This host's number.
        num_hosts: How many there are.

    Attributes:
        spec: The table that this host's rows are.
        part: Its rows.
        cut: Which part has which row.
        rounds: The table's, on this host.
        lock: Held to make a round's adds.
        memory: What processes share.
    """

    def __init__(
        self,
        spec: TableSpec,
        regions: RunRegions,
        membership: Membership,
        *,
        host: int = 0,
        num_hosts: int = 1,
    ) -> None:
        self.spec = own = part_of(spec, host, num_hosts)
        self.memory = memory = TableMemory(own, regions)
        self.membership = membership
        self.lock = memory.lock(membership.worker_of)
        self.cut = Cut(spec, host, num_hosts)
        self._regions = regions
        self._logs: dict[int, WorkerLog] = {}
        self._logging: set[int] = set()  # threads that have a log's lock
        self.rounds = Rounds(memory, self.lock, membership, self._log_of, self._take_in)
        kind = KeyPart if own.has_keys else TablePart
        self.part = kind(memory, memory.lock_of_rows(membership.worker_of), self._logged)

    @property
    def is_ready(self) -> bool:
        """Whether the table has its first values."""
        return bool(self.memory.table[READY])

    def _log_of(self, worker: int, *, again: bool = False) -> WorkerLog:
        """Return a worker's log; opened again where another process may have written in it."""
        log = None if again else self._logs.get(worker)
        if log is None:
            lock = self.memory.lock_of_log(worker, self.membership.worker_of)
            log = WorkerLog(self.memory, worker, lock, self._regions)
            self._logs[worker] = log
        return log

    def _logged(self, worker: int, number: int) -> Entry:
        """Return a logged add."""
        return self._log_of(worker).find(number)

    # --- the first value --------------------------------------------------------------------------

    def open(self, worker: int, init: Any, timeout_s: float) -> None:  # Any: as `_begin` takes it
        """Fill the part as the master, or wait until the master has; then begin as ``worker``.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        line, membership = self.memory.table, self.membership

        def ready() -> bool:
            if not line[READY] and min(membership.awaited(), default=worker) == worker:
                with self.lock.held(timeout_s):
                    if not line[READY]:
                        self.part.begin(init)
                        line[READY] = 1
                        membership.changes.tell()
            return bool(line[READY])

        look = partial(membership.look_for_dead, timeout_s)
        if not membership.changes.wait_until(ready, timeout_s, look):
            master = min(membership.awaited())
            raise PeerTimeout(
                f"Worker {master}, the master, did not open table {self.spec.name!r} within "
                f"{timeout_s:g} s.",
                master,
            )
        if self.spec.staleness.is_bulk_synchronous:
            self._log_of(worker, again=True)
            self.rounds.enter(worker, timeout_s)
        else:
            self.end_logged_adds(timeout_s)

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all; one with a number, once.

        Raises:
            ConfigError: A row is not of this host.
            NotFinite: The entry was unchecked, and is not.
        """
        part = self.part
        num_rows = self.spec.rows if entry.rows is None else entry.rows.numel()
        if num_rows <= part.most_rows:
            if entry.number and not self._log_of(entry.worker).is_finished():
                self._add_logged(entry.worker, None, timeout_s)
            part.add(entry, timeout_s)
            return
        if entry.rows is not None and not (self.spec.has_keys or self.cut.is_own(entry.rows)):
            raise outside(entry.rows, self.spec)
        self._add_logged(entry.worker, entry, timeout_s)

    def _add_logged(self, worker: int, entry: Entry | None, timeout_s: float) -> None:
        log, waiting = self._log_of(worker), Waiting(timeout_s)
        with log.lock.held(timeout_s):
            self._logging.add(get_ident())
            try:
                log.append(
                    entry,
                    self.membership.incarnation(worker),
                    partial(self._make, waiting=waiting),
                )
            finally:
                self._logging.discard(get_ident())

    def _make(self, entry: Entry, waiting: Waiting) -> None:
        """Make an add that is in its worker's log, unless it is made."""
        self.part.change(entry, waiting.remaining_s(), logged=True)

    def end_logged_adds(self, timeout_s: float) -> None:
        """Make the rest of adds that dead workers have logged; of the living, each does so.

        Where another process makes it, wait: what this one reads next must have it.
        """
        if get_ident() in self._logging or self.memory.unfinished.tobytes() == ALL_FINISHED:
            return
        waiting = Waiting(timeout_s)
        for worker, unfinished in enumerate(self.memory.unfinished.tolist()):
            if not unfinished:
                continue
            log = self._log_of(worker, again=True)
            if not log.lock.try_take():
                if self._writes(log, worker):
                    continue  # it makes its adds itself
                log.lock.take(waiting.remaining_s())
            try:
                # What a user's updater raises was the dead worker's to know.
                with suppress(Exception):
                    log.finish(partial(self._make, waiting=waiting))
            finally:
                log.lock.release()

    def _writes(self, log: WorkerLog, worker: int) -> bool:
        """Tell whether who wrote a log lives, and not only another with the same number."""
        return self.membership.lives(worker) and self.membership.is_here(worker, log.incarnation)

    def _take_in(self, number: int, entries: list[Entry], timeout_s: float) -> None:
        """Make a round's adds."""
        waiting, how = Waiting(timeout_s), self.spec.updater.merge
        if how is not None and entries and all(entry.rows is None for entry in entries):
            log = self._log_of(MERGED)
            with log.lock.held(timeout_s):
                if not log.entries_of_round(number):
                    log.append_to_round(_merge(entries, how), number, number - 1)
                entries = log.entries_of_round(number)
        for entry in entries:
            self._make(entry, waiting)


def _merge(entries: list[Entry], how: str) -> Entry:
    """Make one add of a round's, in their order; each is of the whole table."""
    merged = entries[0].delta.clone()
    for entry in entries[1:]:
        merged.add_(entry.delta)
    if how == "mean":
        merged.div_(len(entries))
    return Entry(None, merged, MERGED)
