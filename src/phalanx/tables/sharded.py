"""The memory of a table: shards, and the way of adds and reads to them.

`Storage` has rows by number, cut into ranges; keys.py has rows by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import Mutex, Waiting, fail_point, fail_points
from phalanx.memory import MatrixRows, all_within
from phalanx.tables.log import WorkerLog
from phalanx.tables.membership import MAX_WORKERS, Membership
from phalanx.tables.part import Entry, RecordMemory, RowOutside, TablePart, checked
from phalanx.tables.rounds import Rounds
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableLayout, TableSpec, view_parts, view_record
from phalanx.tables.table_page import MERGED, NUM_LOGS, READY, RESTORED, TablePage
from phalanx.tables.values import outside

__all__ = ["READ_POINTS", "Sharded", "Storage"]

_ALL_FINISHED = bytes(NUM_LOGS)

READ_POINTS = ("before read", "reader's lock held", "rows read")
"""Fail points of a get, in order; it takes a lock only where adds overtake it."""


class _Closed:
    """Stands in for each attribute of a closed table; any use of it raises.

    A ``__getattr__`` of the table itself would slow down every access before that, by a
    twentieth of a get.
    """

    def __init__(self, table: str) -> None:
        self._table = table

    def _refuse(self, *_: object) -> NoReturn:
        raise StateError(
            f"Table {self._table!r} must belong to an open group, but its group is closed."
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = _refuse


class Sharded:
    """A table's memory; the subclass makes its shards.

    Args:
        spec: What all workers agree on.
        regions: Where its regions come from.
        membership: The workers of the run.
    """

    shards: Sequence[TablePart]

    def __init__(self, spec: TableSpec, regions: RunRegions, membership: Membership) -> None:
        name = f"table-{spec.name}"
        self._closed = False
        self._last_undone = 0
        self._logging: set[int] = set()  # threads that have a log's lock
        in_order = spec.staleness.is_bulk_synchronous or spec.updater.remembers
        self._looks_itself = spec.has_keys or (spec.num_shards == 1 and not in_order)
        self.spec = spec
        self.region = region = regions.open_region(name, self.page_bytes(spec))
        self._membership = membership
        self._regions = regions
        self._page = TablePage(region, spec.num_shards)
        self._lock = self._page.lock(f"rounds of table {spec.name}", membership.worker_of)
        self._logs: dict[int, WorkerLog] = {}
        self._only: TablePart | None = None  # the shard, where there is one
        self.rounds = Rounds(
            spec=spec,
            page=self._page,
            lock=self._lock,
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
    def is_ready(self) -> bool:
        """Whether the table has its first values."""
        return bool(self._page.table[READY])

    def _log_of(self, worker: int, *, again: bool = False) -> WorkerLog:
        """Return a worker's log; opened again where another process may have written in it."""
        log = None if again else self._logs.get(worker)
        if log is None:
            label = f"log of worker {worker} of table {self.spec.name}"
            lock = self._page.lock_of_log(worker, label, self._membership.worker_of)
            line, flag = self._page.worker(worker), self._page.unfinished[worker : worker + 1]
            log = WorkerLog(self.spec, worker, line, flag, lock, self._regions)
            self._logs[worker] = log
        return log

    def _logged_for(self, index: int) -> Callable[[int, int], Entry]:
        """Return what finds the share of a shard in a logged add."""

        def find(worker: int, number: int) -> Entry:
            entry = self._log_of(worker).find(number)
            shard = self.shards[index]
            return next((part for each, part in self._parts_of(entry) if each is shard), entry)

        return find

    def _lock_of(self, index: int) -> Mutex:
        label = f"shard {index} of table {self.spec.name}"
        return self._page.lock_of_shard(index, label, self._membership.worker_of)

    # --- the first value --------------------------------------------------------------------------

    def open(self, worker: int, init: Any, timeout_s: float) -> None:  # Any: as a shard's begin
        """Fill the table as the master, or wait until the master has; then begin as ``worker``.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        line = self._page.table

        def ready() -> bool:
            if not line[READY] and min(self._membership.awaited(), default=worker) == worker:
                with self._lock.held(timeout_s):
                    if not line[READY]:
                        self._begin_shards(init)
                        line[READY] = 1
                        self._membership.changes.tell()
            return bool(line[READY])

        membership = self._membership
        look = partial(membership.look_for_dead, timeout_s)
        if not membership.changes.wait_until(ready, timeout_s, look):
            master = min(self._membership.awaited())
            raise PeerTimeout(
                f"Worker {master}, the master, did not open table {self.spec.name!r} within "
                f"{timeout_s:g} s.",
                master,
            )
        if self.spec.staleness.is_bulk_synchronous:
            self._log_of(worker, again=True)
            self.rounds.enter(worker, timeout_s)
        else:
            self._end_logged_adds(timeout_s)

    def _begin_shards(self, init: Any) -> None:
        """Give all shards their first values; the table is not open yet."""
        raise NotImplementedError

    # --- reading and changing ---------------------------------------------------------------------

    def holder_of(self, rows: Tensor | None) -> Self:
        """Return the storage that reads these rows, or keys, and adds to them; None for all.

        Raises:
            ConfigError: A row is outside the table. Where there is one shard, :meth:`read` and
                :meth:`add` say so, as they look in any case.
        """
        if self._looks_itself or rows is None or all_within(rows, self.spec.rows):
            return self
        raise outside(rows, self.spec)

    def read(self, rows: Tensor | None, out: Tensor, worker: int, timeout_s: float) -> None:
        """Copy rows, checked, into ``out``, as ``worker``."""
        if self._page.unfinished.tobytes() != _ALL_FINISHED:
            self._end_logged_adds(timeout_s)
        if fail_points.fault is not None:
            fail_point("before read")
        if self._only is None:
            self._read_shards(rows, out, worker, Waiting(timeout_s))
        else:
            try:
                self._only.read(rows, out, timeout_s)
            except RowOutside:
                assert rows is not None
                raise outside(rows, self.spec) from None
        if fail_points.fault is not None:
            fail_point("rows read")

    def _read_shards(self, rows: Tensor | None, out: Tensor, worker: int, waiting: Waiting) -> None:
        if rows is None:
            for shard in self.shards:
                shard.read(None, out[self._span(shard)], waiting.remaining_s())
            return
        order, routed = self._route(rows, worker)
        found = torch.empty_like(out)
        for shard, piece, span in routed:
            shard.read(piece, found[span], waiting.remaining_s())
        # The inverse of `order`, because selecting rows is four times as fast as placing them.
        ascending = torch.arange(order.numel(), device="cpu")
        back = torch.empty_like(order).scatter_(0, order, ascending)
        MatrixRows(found).take(back, out)

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all; one with a number, once.

        Raises:
            NotFinite: The entry was unchecked, and is not.
        """
        if self._page.unfinished.tobytes() != _ALL_FINISHED:
            self._end_logged_adds(timeout_s)
        only, rows = self._only, entry.rows
        num_rows = self.spec.rows if rows is None else rows.numel()
        if only is not None and num_rows <= only.most_rows:
            if entry.number and not self._log_of(entry.worker).is_finished():
                self._add_logged(entry.worker, [], timeout_s)
            try:
                only.add(entry, timeout_s)
            except RowOutside:
                assert entry.rows is not None
                raise outside(entry.rows, self.spec) from None
        else:
            if self._looks_itself and not self.spec.has_keys and entry.rows is not None:
                self._refuse_outside(entry.rows)
            if self.spec.has_keys:  # before there is room for new ones
                entry = checked(entry)
            self._add_logged(entry.worker, [entry], timeout_s)

    def _refuse_outside(self, rows: Tensor) -> None:
        if not all_within(rows, self.spec.rows, self.spec.first_row):
            raise outside(rows, self.spec)

    def add_later(self, entry: Entry, timeout_s: float) -> None:
        """Take one add without waiting for other hosts: there are none."""
        self.add(entry, timeout_s)

    def finish_adds(self, worker: int, timeout_s: float) -> None:
        """Wait until what ``worker`` has added is in: it is."""

    def _add_logged(self, worker: int, entries: list[Entry], timeout_s: float) -> None:
        log, waiting = self._log_of(worker), Waiting(timeout_s)
        with log.lock.held(timeout_s):
            self._logging.add(get_ident())
            try:
                log.append(
                    entries,
                    partial(self._make, waiting=waiting),
                    lambda entry: any(shard.has(worker, entry.number) for shard in self.shards),
                    lambda numbered: self._make_room(log, numbered, waiting),
                )
            finally:
                self._logging.discard(get_ident())

    def _make_room(self, log: WorkerLog, entries: list[Entry], waiting: Waiting) -> None:
        """Have room in every shard for what adds bring; rows that have numbers are there."""

    def _make(self, entry: Entry, waiting: Waiting) -> None:
        """Make an add that is in its worker's log, in every shard that has not made it."""
        failed = None
        for shard, part in self._parts_of(entry):
            try:
                shard.change(part, waiting.remaining_s(), logged=True)
            except PeerTimeout:
                raise
            except Exception as exc:  # of the updater: this shard is as it was
                failed = failed or exc
        if failed is not None:
            raise failed

    def _end_logged_adds(self, timeout_s: float) -> None:
        """Make the rest of adds that dead workers have logged; of the living, each does so.

        Where another process makes it, wait: what this one reads next must have it.
        """
        if get_ident() in self._logging:
            return
        waiting = Waiting(timeout_s)
        for worker, unfinished in enumerate(self._page.unfinished.tolist()):
            if not unfinished:
                continue
            log = self._log_of(worker, again=True)
            if not log.lock.try_take():
                if worker >= MAX_WORKERS or self._membership.lives(worker):
                    continue  # it makes its adds itself
                log.lock.take(waiting.remaining_s())
            try:
                # What a user's updater raises was the dead worker's to know.
                with suppress(Exception):
                    log.finish(partial(self._make, waiting=waiting))
            finally:
                log.lock.release()

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

    def _parts_of(self, entry: Entry) -> list[tuple[TablePart, Entry]]:
        if len(self.shards) == 1:
            return [(self.shards[0], entry)]
        if entry.rows is None:
            return [(s, entry._replace(delta=entry.delta[self._span(s)])) for s in self.shards]
        order, routed = self._route(entry.rows, entry.worker)
        return [
            (shard, entry._replace(rows=piece, delta_rows=order[span]))
            for shard, piece, span in routed
        ]

    def _span(self, shard: TablePart) -> slice:
        """Return where a shard's rows lie in a tensor of all rows, where rows have numbers."""
        start = shard.first_row - self.spec.first_row
        return slice(start, start + shard.num_rows)

    def _owners(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the shard of each row, as uint8."""
        raise NotImplementedError

    def _route(
        self, rows: Tensor, worker: int
    ) -> tuple[Tensor, list[tuple[TablePart, Tensor, slice]]]:
        """Sort rows by shard, those of one shard as they came.

        Each worker begins with another shard, so that two adds at once seldom meet at one.

        Returns:
            Where in the list the sorted rows stood; and for each shard that has any of them its
            rows, and where among the sorted ones they are.
        """
        # In numpy: it needs half of torch's time for few rows, and sorts bytes by counting them.
        num_shards, numbers = len(self.shards), rows.numpy()
        owners = self._owners(numbers)
        order = np.argsort(owners, kind="stable")
        ends = np.bincount(owners, minlength=num_shards).cumsum().tolist()
        sorted_rows = numbers.take(order)
        routed = []
        for turn in range(num_shards):
            index = (turn + worker) % num_shards
            start, stop = ends[index - 1] if index else 0, ends[index]
            if start < stop:
                piece = torch.from_numpy(sorted_rows[start:stop])
                routed.append((self.shards[index], piece, slice(start, stop)))
        return torch.from_numpy(order), routed

    @property
    def num_undone(self) -> int:
        """How many interrupted adds were undone, by anybody."""
        return self._last_undone if self._closed else sum(s.num_undone for s in self.shards)

    def close(self) -> None:
        """Let go of the memory, also where somebody keeps a handle of the table.

        A call that another thread is in keeps what it uses until it returns.
        """
        if self._closed:
            return
        self._last_undone = self.num_undone
        self._closed = True
        for shard in self.shards:
            shard.close()
        closed = _Closed(self.spec.name)
        for name in vars(self).keys() - {"spec", "_closed", "_last_undone"}:
            setattr(self, name, closed)


class Storage(Sharded):
    """The memory of a table of numbered rows: one region, cut into shards.

    Args:
        spec: What all workers agree on.
        regions: Where its regions come from.
        membership: The workers of the run.
    """

    shards: list[TablePart]

    def __init__(self, spec: TableSpec, regions: RunRegions, membership: Membership) -> None:
        super().__init__(spec, regions, membership)
        layout = TableLayout.of(spec)
        parts = view_parts(self.region, spec, layout)
        self.shards = [
            TablePart(
                lock=self._lock_of(index),
                header=self._page.shard(index),
                done=self._page.done(index),
                parts=[part[first:stop] for part in parts],
                record=RecordMemory(*view_record(self.region, spec, layout, index)),
                updater=spec.updater,
                first_row=spec.first_row + first,
                logged=self._logged_for(index),
            )
            for index, (first, stop) in enumerate(pairwise(layout.shard_starts))
        ]
        self._only = self.shards[0] if spec.num_shards == 1 else None
        self._bounds = np.array([shard.first_row for shard in self.shards[1:]], dtype=np.int64)

    @staticmethod
    def page_bytes(spec: TableSpec) -> int:
        """Return the size of the table's region, which has the page and the rows."""
        return TableLayout.of(spec).nbytes

    @property
    def nbytes(self) -> int:
        """How much memory the table takes, logs apart."""
        return self.region.nbytes

    def _begin_shards(self, init: Tensor) -> None:
        for shard in self.shards:
            shard.begin(init[self._span(shard)] if init.dim() else init)

    def _owners(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.searchsorted(self._bounds, rows, side="right").astype(np.uint8)

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; every shard's are of one moment."""
        self._end_logged_adds(timeout_s)
        if len(self.shards) == 1:
            return self.shards[0].copy_all(timeout_s)
        copies: list[Tensor] = []
        for shard in self.shards:  # one at a time: the whole may be large
            parts = shard.copy_all(timeout_s)
            copies = copies or [p.new_empty((self.spec.rows, p.shape[1])) for p in parts]
            for copy, part in zip(copies, parts, strict=True):
                copy[self._span(shard)] = part
        return copies

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace the values, and as many states as are given; whole, whoever dies."""
        entries = [
            Entry(None, part.contiguous(), RESTORED, assigns=True, target=target)
            for target, part in enumerate(parts)
        ]
        self._add_logged(RESTORED, entries, timeout_s)


def _merge(entries: list[Entry], how: str) -> Entry:
    """Make one add of a round's, in their order; each is of the whole table."""
    merged = entries[0].delta.clone()
    for entry in entries[1:]:
        merged.add_(entry.delta)
    if how == "mean":
        merged.div_(len(entries))
    return Entry(None, merged, MERGED)
