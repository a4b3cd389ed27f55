"""The parts of a table on this host, and the logs from which adds to several of them are made.

`OwnRows` has rows by number, cut into ranges; keys.py has rows by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import Any

from torch import Tensor

from phalanx.errors import PeerTimeout
from phalanx.ipc import Mutex, Waiting
from phalanx.tables.cut import Cut, part_of
from phalanx.tables.log import WorkerLog
from phalanx.tables.membership import MAX_WORKERS, Membership
from phalanx.tables.part import Entry, RecordMemory, TablePart, checked
from phalanx.tables.rounds import Rounds
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableLayout, TableSpec, view_parts, view_record
from phalanx.tables.table_page import MERGED, NUM_LOGS, READY, RESTORED, TablePage
from phalanx.tables.values import outside

__all__ = ["ALL_FINISHED", "OwnParts", "OwnRows"]

ALL_FINISHED = bytes(NUM_LOGS)
"""The bytes UNFINISHED where no log holds an add that is not in all parts."""


class OwnParts:
    """This host's parts of a table; the subclass makes them.

    Args:
        spec: The table, of all hosts.
        regions: Where its memory comes from.
        membership: The workers of the run.
        host: This host's number.
        num_hosts: How many there are.

    Attributes:
        spec: The table that this host's rows are.
        parts: Its shards.
        cut: Which part has which row.
        rounds: The table's, on this host.
        lock: Held to make a round's adds.
        page: The words that processes share.
    """

    parts: Sequence[TablePart]

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
        self.region = region = regions.open_region(f"table-{spec.name}", self.page_bytes(own))
        self.membership = membership
        self.page = TablePage(region, spec.num_shards)
        self.lock = self.page.lock(f"rounds of table {spec.name}", membership.worker_of)
        self.cut = Cut(spec, host, num_hosts, self.page.table)
        self._regions = regions
        self._logs: dict[int, WorkerLog] = {}
        self._logging: set[int] = set()  # threads that have a log's lock
        self.rounds = Rounds(
            spec=own,
            page=self.page,
            lock=self.lock,
            membership=membership,
            log_of=self._log_of,
            take_in=self._take_in,
        )

    @staticmethod
    def page_bytes(spec: TableSpec) -> int:
        """Return the size of the region that has the table's page."""
        raise NotImplementedError

    @classmethod
    def take_memory(cls, spec: TableSpec, regions: RunRegions) -> None:
        """Make the regions of a new table.

        Raises:
            OutOfSpace: There is not so much memory.
        """
        regions.open_region(f"table-{spec.name}", cls.page_bytes(spec))

    @property
    def nbytes(self) -> int:
        """How much memory the parts take, logs apart."""
        return self.region.nbytes

    @property
    def is_ready(self) -> bool:
        """Whether the table has its first values."""
        return bool(self.page.table[READY])

    def _log_of(self, worker: int, *, again: bool = False) -> WorkerLog:
        """Return a worker's log; opened again where another process may have written in it."""
        log = None if again else self._logs.get(worker)
        if log is None:
            label = f"log of worker {worker} of table {self.spec.name}"
            lock = self.page.lock_of_log(worker, label, self.membership.worker_of)
            line, flag = self.page.worker(worker), self.page.unfinished[worker : worker + 1]
            log = WorkerLog(self.spec, worker, line, flag, lock, self._regions)
            self._logs[worker] = log
        return log

    def _logged_for(self, index: int) -> Callable[[int, int], Entry]:
        """Return what finds the share of a part in a logged add."""

        def find(worker: int, number: int) -> Entry:
            entry = self._log_of(worker).find(number)
            own = self.parts[index]
            return next((share for part, share in self._shares(entry) if part is own), entry)

        return find

    def _lock_of(self, index: int) -> Mutex:
        label = f"shard {index} of table {self.spec.name}"
        return self.page.lock_of_shard(index, label, self.membership.worker_of)

    # --- the first value --------------------------------------------------------------------------

    def open(self, worker: int, init: Any, timeout_s: float) -> None:  # Any: as `_begin` takes it
        """Fill the parts as the master, or wait until the master has; then begin as ``worker``.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        line, membership = self.page.table, self.membership

        def ready() -> bool:
            if not line[READY] and min(membership.awaited(), default=worker) == worker:
                with self.lock.held(timeout_s):
                    if not line[READY]:
                        self._begin(init)
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

    def _begin(self, init: Any) -> None:
        """Give all parts their first values; the table is not open yet."""
        raise NotImplementedError

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all; one with a number, once.

        Raises:
            ConfigError: A row is not of this host.
            NotFinite: The entry was unchecked, and is not.
        """
        part = self.parts[0]
        num_rows = self.spec.rows if entry.rows is None else entry.rows.numel()
        if len(self.parts) == 1 and num_rows <= part.most_rows:
            if entry.number and not self._log_of(entry.worker).is_finished():
                self._add_logged(entry.worker, [], timeout_s)
            part.add(entry, timeout_s)
            return
        if self.spec.has_keys:  # before there is room for new ones
            entry = checked(entry)
        elif not self.cut.is_own(entry.rows) and entry.rows is not None:
            raise outside(entry.rows, self.spec)
        self._add_logged(entry.worker, [entry], timeout_s)

    def assign_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace the values, and as many states as are given; whole, whoever dies."""
        entries = [
            Entry(None, part.contiguous(), RESTORED, assigns=True, target=target)
            for target, part in enumerate(parts)
        ]
        self._add_logged(RESTORED, entries, timeout_s)

    def _add_logged(self, worker: int, entries: list[Entry], timeout_s: float) -> None:
        log, waiting = self._log_of(worker), Waiting(timeout_s)
        with log.lock.held(timeout_s):
            self._logging.add(get_ident())
            try:
                log.append(
                    entries,
                    self.membership.incarnation(worker) if worker < MAX_WORKERS else 0,
                    partial(self._make, waiting=waiting),
                    lambda entry: any(part.has(worker, entry.number) for part in self.parts),
                    lambda numbered: self._make_room(log, numbered, waiting),
                )
            finally:
                self._logging.discard(get_ident())

    def _make_room(self, log: WorkerLog, entries: list[Entry], waiting: Waiting) -> None:
        """Have room in every part for what adds bring; rows that have numbers are there."""

    def _make(self, entry: Entry, waiting: Waiting) -> None:
        """Make an add that is in its worker's log, in every part that has not made it."""
        failed = None
        for part, share in self._shares(entry):
            try:
                part.change(share, waiting.remaining_s(), logged=True)
            except PeerTimeout:
                raise
            except Exception as exc:  # of the updater: this part is as it was
                failed = failed or exc
        if failed is not None:
            raise failed

    def end_logged_adds(self, timeout_s: float) -> None:
        """Make the rest of adds that dead workers have logged; of the living, each does so.

        Where another process makes it, wait: what this one reads next must have it.
        """
        if get_ident() in self._logging or self.page.unfinished.tobytes() == ALL_FINISHED:
            return
        waiting = Waiting(timeout_s)
        for worker, unfinished in enumerate(self.page.unfinished.tolist()):
            if not unfinished:
                continue
            log = self._log_of(worker, again=True)
            if not log.lock.try_take():
                if worker >= MAX_WORKERS or self._writes(log, worker):
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
        waiting, how = Waiting(timeout_s), self.spec.updater.merges_rounds
        if how is not None and entries:
            log = self._log_of(MERGED)
            with log.lock.held(timeout_s):
                if not log.entries_of_round(number):
                    log.append_to_round(_merge(entries, how), number, number - 1)
                entries = log.entries_of_round(number)
        for entry in entries:
            self._make(entry, waiting)

    def _shares(self, entry: Entry) -> list[tuple[TablePart, Entry]]:
        """Return what each part has of an add of this host's rows."""
        parts, cut = self.parts, self.cut
        if len(parts) == 1:
            return [(parts[0], entry)]
        if entry.rows is None:
            return [
                (part, entry._replace(delta=entry.delta[cut.own_span(index)]))
                for index, part in enumerate(parts)
            ]
        order, pieces = cut.route(entry.rows, entry.worker)
        first = cut.own.start
        return [
            (parts[index - first], entry._replace(rows=rows, delta_rows=order[span]))
            for index, rows, span in pieces
        ]


class OwnRows(OwnParts):
    """This host's parts of a table of numbered rows: one region, cut into shards."""

    def __init__(self, *args: Any, **options: Any) -> None:  # Any: as `OwnParts` takes them
        super().__init__(*args, **options)
        spec = self.spec
        layout = TableLayout.of(spec)
        parts = view_parts(self.region, spec, layout)
        self.parts = [
            TablePart(
                lock=self._lock_of(index),
                header=self.page.shard(index),
                done=self.page.done(index),
                parts=[part[first:stop] for part in parts],
                record=RecordMemory(*view_record(self.region, spec, layout, index)),
                spec=spec,
                first_row=spec.first_row + first,
                logged=self._logged_for(index),
            )
            for index, (first, stop) in enumerate(pairwise(layout.shard_starts))
        ]

    @staticmethod
    def page_bytes(spec: TableSpec) -> int:
        """Return the size of the table's region, which has the page and the rows."""
        return TableLayout.of(spec).nbytes

    def _begin(self, init: Tensor) -> None:
        for index, part in enumerate(self.parts):
            part.begin(init[self.cut.own_span(index)] if init.dim() else init)


def _merge(entries: list[Entry], how: str) -> Entry:
    """Make one add of a round's, in their order; each is of the whole table."""
    merged = entries[0].delta.clone()
    for entry in entries[1:]:
        merged.add_(entry.delta)
    if how == "mean":
        merged.div_(len(entries))
    return Entry(None, merged, MERGED)
