"""What a host's server does for workers of other hosts: their calls, on this host's memory.

A worker of another host is a worker here, too, with the same number: it is on this host's page of
workers, has its line in every table, and its adds go through the same shards and the same logs. So
rounds, clocks and barriers need to know nothing of the network. What differs: its process is
elsewhere (`Membership.is_elsewhere`), so its own host's server is asked whether it lives. While
that one is silent, killed and not yet started again say, what a worker asks for shows that it does.

A request may come twice. Each that must count once carries what tells a repetition:

    add                  a number, which each shard keeps with the effect (part.py)
    add of a round       the same number, which the log keeps, too (log.py)
    tick, arrive         the clock itself
    barrier              how many barriers were finished before
    enter                the client's 16 bytes, kept beside its incarnation
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.clock import now_s
from phalanx.cluster import Answer, Head, Request
from phalanx.errors import ConfigError, StateError
from phalanx.ipc import wait_until
from phalanx.memory import all_within
from phalanx.tables.deferred_adds import MOST_TOGETHER
from phalanx.tables.host_operations import (
    RULE,
    UNKNOWN,
    Operation,
    as_memory,
    from_memory,
    sizes_of_all,
)
from phalanx.tables.keys import KeyStorage
from phalanx.tables.membership import MAX_WORKERS
from phalanx.tables.part import Entry
from phalanx.tables.row_initializer import Uniform
from phalanx.tables.run_context import RunContext
from phalanx.tables.sharded import Storage
from phalanx.tables.spec import TableSpec

__all__ = ["HostService"]

_LOCK_S = 10.0  # a lock is held for microseconds, unless its owner is halted
_LONGEST_WAIT_S = 1e5
_INCARNATION_BITS = 40
_CLIENT_LO, _CLIENT_HI, _INCARNATION, _HOST, _HOME_INCARNATION = range(5)
_LINE = 8
_WAITING = {Operation.BARRIER, Operation.OPEN, Operation.FINISH}
_FOR_ANYBODY = {Operation.ENTER, Operation.MEMBERS}
_READING = {Operation.GET, Operation.COPY_ALL, Operation.COUNTS, Operation.KEYS}


class HostService:
    """This host's tables, for workers elsewhere.

    Args:
        context: The run as this host has it.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._membership = context.membership
        region = context.regions.open_region("elsewhere", 8 * _LINE * MAX_WORKERS)
        self._lines = region.buffer[: 8 * _LINE * MAX_WORKERS].cast("q")
        self._storages: dict[str, Storage | KeyStorage] = {}
        self._mutex = threading.RLock()
        self._heard_s: dict[int, float] = {}  # when each worker of another host last asked
        self._answers: dict[int, Callable[[Request], Answer]] = {
            Operation.ENTER: self._enter,
            Operation.LEAVE: self._leave,
            Operation.MEMBERS: self._members,
            Operation.TICK: self._tick,
            Operation.BARRIER: self._barrier,
            Operation.OPEN: self._open,
            Operation.GET: self._get,
            Operation.ADD: self._add,
            Operation.ADD_TOGETHER: self._add_together,
            Operation.PUT: self._put,
            Operation.ARRIVE: self._arrive,
            Operation.FINISH: self._finish,
            Operation.COPY_ALL: self._copy_all,
            Operation.REPLACE_ALL: self._replace_all,
            Operation.COUNTS: self._counts,
            Operation.KEYS: self._keys,
        }

    # --- as a Service -----------------------------------------------------------------------------

    def hear(self, head: Head) -> None:
        """Note that a worker lives, though its host's server may be silent."""
        if head.worker < MAX_WORKERS and self._membership.is_here(head.worker, head.incarnation):
            self._heard_s[head.worker] = now_s()

    def payload_bytes(self, head: Head) -> int:
        """Return how long the payload must be, by the table's own sizes."""
        operation, args = head.operation, head.args
        if operation == Operation.OPEN:
            limit = TableSpec.from_mapping(_parsed(head.text))
            whole = max(1, limit.rows) * limit.cols * limit.dtype.itemsize
            return _checked(args[2], 0, max(RULE.size, whole), "bytes of `init`")
        if operation == Operation.GET:
            return 8 * _checked(args[0], 0, None, "rows") if args[0] != -1 else 0
        if operation in (Operation.ADD, Operation.PUT):
            spec = self._storage(head.text).spec
            row_bytes = spec.entry_cols(bool(args[3])) * spec.dtype.itemsize
            if args[0] == -1:
                return spec.rows * row_bytes
            return _checked(args[0], 0, None, "rows") * (8 + row_bytes)
        if operation == Operation.ADD_TOGETHER:
            spec = self._storage(head.text).spec
            num_adds = _checked(args[0], 1, MOST_TOGETHER, "adds")
            num_rows = _checked(args[1], 0, None, "rows")
            row_bytes = spec.entry_cols(assigns=False) * spec.dtype.itemsize
            return 8 * num_adds + num_rows * (8 + row_bytes)
        if operation == Operation.REPLACE_ALL:
            spec = self._storage(head.text).spec
            num_rows = _checked(args[0], 0, None, "keys") if spec.has_keys else spec.rows
            num_parts = _checked(args[1], 1, 1 + len(spec.updater.states), "parts")
            sizes = sizes_of_all(spec, num_rows)[:num_parts]
            keys = 8 * num_rows if spec.has_keys else 0
            return keys + sum(dtype.itemsize * rows * cols for dtype, (rows, cols) in sizes)
        return 0

    def waits(self, head: Head) -> bool:
        """Tell whether the answer depends on other workers."""
        return head.operation in _WAITING

    def answer(self, request: Request) -> Answer:
        """Do what is asked."""
        head = request.head
        answer = self._answers.get(head.operation)
        if answer is None:
            raise ConfigError(f"`operation` must be one of this version, but is {head.operation}.")
        if head.operation not in _FOR_ANYBODY and not 0 <= head.worker < MAX_WORKERS:
            raise ConfigError(f"`worker` must be below {MAX_WORKERS}, but is {head.worker}.")
        if head.operation not in _FOR_ANYBODY | _READING:
            self._refuse_stale(head)
        return answer(request)

    def _refuse_stale(self, head: Head) -> None:
        """Fence off a worker that was taken for dead, or whose number is another's by now."""
        if not self._membership.is_here(head.worker, head.incarnation):
            raise StateError(
                f"Worker {head.worker} must be of the run, but was taken for lost on this host, "
                "or its number is another's by now. What it asked for was not done. Join again."
            )

    # --- workers ----------------------------------------------------------------------------------

    def _enter(self, request: Request) -> Answer:
        head = request.head
        asked = _mapping(head.text)
        worker = None if head.args[0] < 0 else head.args[0]
        client = (
            int.from_bytes(head.client[:8], "little", signed=True),
            int.from_bytes(head.client[8:], "little", signed=True),
        )
        with self._mutex:
            known = self._line_of_client(client)
            if known is None:
                expected = asked.get("num_expected")
                known = self._membership.enter(
                    worker=worker, num_expected=expected, timeout_s=_LOCK_S, elsewhere=True
                )
                line = self._line(known)
                line[_CLIENT_LO] = line[_CLIENT_HI] = 0
                line[_INCARNATION] = self._membership.incarnation(known)
                line[_HOST] = int(asked["host"])
                line[_HOME_INCARNATION] = int(asked.get("home_incarnation", 0))
                line[_CLIENT_LO], line[_CLIENT_HI] = client
            else:  # it asks again, or knows by now how its own host calls it
                self._line(known)[_HOME_INCARNATION] = int(asked.get("home_incarnation", 0))
        finished = self._context.barrier().num_finished
        return Answer((known, self._line(known)[_INCARNATION], finished))

    def _line(self, worker: int) -> memoryview:
        return self._lines[_LINE * worker : _LINE * (worker + 1)]

    def _line_of_client(self, client: tuple[int, int]) -> int | None:
        """Return the number under which a client has entered, if it has."""
        for worker in self._membership.here():
            line = self._line(worker)
            if (line[_CLIENT_LO], line[_CLIENT_HI]) == client and self._membership.is_here(
                worker, line[_INCARNATION]
            ):
                return worker
        return None

    def _leave(self, request: Request) -> Answer:
        self._membership.leave(request.head.worker, request.head.incarnation, _LOCK_S)
        return Answer()

    def _members(self, request: Request) -> Answer:  # noqa: ARG002 - as all answers are called
        self._membership.mark_dead(_LOCK_S)
        here = {
            worker: self._membership.incarnation(worker)
            for worker in self._membership.here()
            if not self._membership.is_elsewhere(worker)
        }
        return Answer(text=json.dumps(here))

    def elsewhere(self, host: int) -> list[tuple[int, int, int]]:
        """Return workers of another host that are here: number, incarnation here, and there."""
        found = []
        for worker in self._membership.here():
            line = self._line(worker)
            if self._membership.is_elsewhere(worker) and line[_HOST] == host:
                found.append((worker, line[_INCARNATION], line[_HOME_INCARNATION]))
        return found

    def lose_silent(self, host: int, since_s: float) -> None:
        """Mark the workers of a silent host dead that have asked for nothing since, either."""
        for worker, incarnation, _ in self.elsewhere(host):
            if self._heard_s.get(worker, -math.inf) < since_s:
                self.mark_lost(worker, incarnation)

    def mark_lost(self, worker: int, incarnation: int) -> None:
        """Say that a worker of another host is dead."""
        self._membership.mark_lost(worker, incarnation, _LOCK_S)

    def has_begun(self) -> bool:
        """Tell whether a worker has come."""
        return self._membership.has_begun()

    def is_anybody_here(self) -> bool:
        """Tell whether a worker has come and not left."""
        return bool(self._membership.here())

    def is_over(self) -> bool:
        """Tell whether workers have come, and every one has left or died."""
        self._membership.mark_dead(_LOCK_S)
        return self.has_begun() and not self._membership.awaited()

    def _tick(self, request: Request) -> Answer:
        self._membership.advance_to(request.head.worker, request.head.args[0])
        return Answer()

    def _barrier(self, request: Request) -> Answer:
        head, barrier = request.head, self._context.barrier()
        finished = None if head.args[0] == UNKNOWN else head.args[0]
        round_ = barrier.wait(head.worker, head.text, _seconds(head.args[1]), finished=finished)
        return Answer((round_, barrier.num_finished))

    # --- tables -----------------------------------------------------------------------------------

    def _storage(self, name: str) -> Storage | KeyStorage:
        """Return a table's memory; a server that was started again finds it by its name."""
        with self._mutex:
            found = self._storages.get(name)
            if found is None:
                spec = self._context.known_spec(name)
                if spec is None:
                    raise StateError(f"Table {name!r} must be opened first, but is not.")
                found = self._storages[name] = self._make(spec)
            return found

    def _make(self, spec: TableSpec) -> Storage | KeyStorage:
        if spec.has_keys:
            return self._context.storage(KeyStorage, spec, _LOCK_S)
        return self._context.storage(Storage, spec, _LOCK_S)

    def _open(self, request: Request) -> Answer:
        head, timeout_s = request.head, _seconds(request.head.args[1])
        spec = TableSpec.from_mapping(_parsed(request.head.text))
        with self._mutex:
            storage = self._make(spec)
            self._storages[spec.name] = storage
        init = None
        if head.args[0]:
            init = _read_init(request.payload, spec, head.args[3])
        else:

            def somebody_else_fills_it() -> bool:
                master = min(self._membership.awaited(), default=head.worker)
                return storage.is_ready or master == head.worker

            wait_until(
                somebody_else_fills_it, timeout_s, lambda: self._membership.look_for_dead(_LOCK_S)
            )
            if not storage.is_ready:
                return Answer((0, 0))
        storage.open(head.worker, init, timeout_s)
        return Answer((1, storage.rounds.clock_of(head.worker)))

    def _rows(self, request: Request, spec: TableSpec) -> tuple[Tensor | None, int]:
        num_rows = request.head.args[0]
        if num_rows == -1:
            return None, 0
        return self._rows_at(0, num_rows, request, spec)

    def _rows_at(
        self, offset: int, num_rows: int, request: Request, spec: TableSpec
    ) -> tuple[Tensor, int]:
        rows, offset = from_memory(request.payload, offset, torch.int64, (num_rows,))
        if not spec.has_keys and not all_within(rows, spec.rows, spec.first_row):
            raise ConfigError(
                f"`rows` must be within this host's part of table {spec.name!r}, which has "
                f"{spec.rows} rows from row {spec.first_row} on, but are not."
            )
        return rows, offset

    def _get(self, request: Request) -> Answer:
        head = request.head
        storage = self._storage(head.text)
        spec = storage.spec
        rows, _ = self._rows(request, spec)
        num_rows = spec.rows if rows is None else rows.numel()
        out = torch.empty((num_rows, spec.cols), dtype=spec.dtype, device="cpu")
        storage.read(rows, out, head.worker, _LOCK_S)
        return Answer(payload=[as_memory(out)])

    def _entry(self, request: Request, number: int, *, assigns: bool) -> Entry:
        spec = self._storage(request.head.text).spec
        rows, offset = self._rows(request, spec)
        num_rows = spec.rows if rows is None else rows.numel()
        shape = (num_rows, spec.entry_cols(assigns))
        delta, _ = from_memory(request.payload, offset, spec.dtype, shape)
        return Entry(rows, delta, request.head.worker, assigns, number=number)

    def _add(self, request: Request) -> Answer:
        number, assigns = _first_number(request.head, 1), bool(request.head.args[3])
        entry = self._entry(request, number, assigns=assigns)
        self._storage(request.head.text).add(entry, _LOCK_S)
        return Answer()

    def _add_together(self, request: Request) -> Answer:
        """Make several adds, as if each had come alone; one that is refused ends them."""
        head = request.head
        storage = self._storage(head.text)
        num_adds, num_rows = head.args[:2]
        first, spec = _first_number(head, num_adds), storage.spec
        counted, offset = from_memory(request.payload, 0, torch.int64, (num_adds,))
        counts = counted.tolist()
        if min(counts) < 0 or sum(counts) != num_rows:
            raise ConfigError(
                f"The rows of each add must make {num_rows} together, but make {sum(counts)}."
            )
        rows, offset = self._rows_at(offset, num_rows, request, spec)
        shape = (num_rows, spec.entry_cols(assigns=False))
        delta, _ = from_memory(request.payload, offset, spec.dtype, shape)
        each = zip(rows.split(counts), delta.split(counts), strict=True)
        for number, (its_rows, its_delta) in enumerate(each, first):
            storage.add(Entry(its_rows, its_delta, head.worker, number=number), _LOCK_S)
        return Answer()

    def _put(self, request: Request) -> Answer:
        _, number, _, assigns = request.head.args
        entry = self._entry(request, _first_number(request.head, 1), assigns=bool(assigns))
        self._storage(request.head.text).rounds.put_into(entry, number, _LOCK_S)
        return Answer()

    def _arrive(self, request: Request) -> Answer:
        rounds = self._storage(request.head.text).rounds
        rounds.arrive_at(request.head.worker, request.head.args[0])
        return Answer()

    def _finish(self, request: Request) -> Answer:
        head = request.head
        rounds = self._storage(head.text).rounds
        arrival = rounds.arrive_at(head.worker, head.args[0])
        rounds.finish(arrival, _seconds(head.args[1]))
        return Answer()

    def _copy_all(self, request: Request) -> Answer:
        parts = self._storage(request.head.text).copy_all(_LOCK_S)
        return Answer((len(parts[0]),), [as_memory(part.contiguous()) for part in parts])

    def _replace_all(self, request: Request) -> Answer:
        storage, (num_keys, num_parts, *_) = self._storage(request.head.text), request.head.args
        spec, offset, parts = storage.spec, 0, []
        if spec.has_keys:
            keys, offset = from_memory(request.payload, 0, torch.int64, (num_keys,))
            parts.append(keys)
        for dtype, shape in sizes_of_all(spec, num_keys if spec.has_keys else spec.rows)[
            :num_parts
        ]:
            part, offset = from_memory(request.payload, offset, dtype, shape)
            parts.append(part)
        storage.replace_all(parts, _LOCK_S)
        return Answer()

    def _counts(self, request: Request) -> Answer:
        storage = self._storage(request.head.text)
        num_keys = storage.num_keys() if isinstance(storage, KeyStorage) else 0
        return Answer((storage.num_undone, num_keys, storage.nbytes))

    def _keys(self, request: Request) -> Answer:
        storage = self._storage(request.head.text)
        if not isinstance(storage, KeyStorage):
            raise ConfigError(f"Table {request.head.text!r} must have keys, but has rows.")
        return Answer(payload=[as_memory(storage.keys(_LOCK_S))])


def _first_number(head: Head, num_adds: int) -> int:
    """Return the number of the first add that is asked for, over all incarnations."""
    most = (1 << _INCARNATION_BITS) - num_adds
    if not 1 <= head.number <= most:
        raise ConfigError(f"`number` must be 1 to {most} for an add, but is {head.number}.")
    return head.incarnation << _INCARNATION_BITS | head.number


def _checked(value: int, low: int, high: int | None, what: str) -> int:
    if value < low or (high is not None and value > high):
        limit = "or more" if high is None else f"to {high}"
        raise ConfigError(f"The number of {what} must be {low} {limit}, but is {value}.")
    return value


def _seconds(milliseconds: int) -> float:
    return min(max(0, milliseconds) * 1e-3, _LONGEST_WAIT_S)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _mapping(text: str) -> dict[str, Any]:  # Any: what JSON holds
    found = _parsed(text)
    if not isinstance(found, dict) or type(found.get("host")) is not int:
        raise ConfigError("`text` must be JSON that says which host enters, but is not.")
    return found


def _read_init(payload: memoryview, spec: TableSpec, form: int) -> Tensor | Uniform:
    """Return what a master sends as a table's first values; see `RemotePart.open`."""
    if form == 2:  # a rule for the rows of keys
        return Uniform(*RULE.unpack(payload))
    if form == 1:  # one number
        return from_memory(payload, 0, spec.dtype, ())[0]
    num_rows = 1 if spec.has_keys else spec.rows
    return from_memory(payload, 0, spec.dtype, (num_rows, spec.cols))[0]
