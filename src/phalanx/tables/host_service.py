"""What a host's server does for workers of other hosts: their calls, on this host's memory.

A worker of another host is a worker here, too, with the same number: it is on this host's page of
workers, has its line in every table, and its adds go through the same shards and the same logs. So
rounds, clocks and barriers need to know nothing of the network. What differs: its process is
elsewhere (`Membership.is_elsewhere`), and lives as long as its session does, a connection that the
kernel closes when the process dies. A worker whose session is gone and not back within 2 s, or 10 s
after another server has begun, is dead here. One that is halted is not.

A request may come twice. Each that must count once carries what tells a repetition:

    add                  a number, which each shard keeps with the effect (part.py)
    add of a round       the same number, which the log keeps, too (log.py)
    tick, arrive         the clock itself
    barrier              how many barriers were finished before
    enter                two numbers of the client's, kept beside its incarnation
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.clock import now_s
from phalanx.cluster import MAX_PAYLOAD_BYTES, Answer, Head, Link, Request
from phalanx.errors import ConfigError, StateError
from phalanx.memory import all_within
from phalanx.tables.host_operations import (
    UNKNOWN,
    Operation,
    as_memory,
    from_memory,
    read_all,
)
from phalanx.tables.membership import MAX_WORKERS
from phalanx.tables.part import Entry
from phalanx.tables.router import Router
from phalanx.tables.row_initializer import Uniform
from phalanx.tables.run_context import RunContext
from phalanx.tables.spec import TableSpec

__all__ = ["HostService"]

_LOCK_S = 10.0  # a lock is held for microseconds, unless its owner is halted
_LONGEST_WAIT_S = 1e5
_BACK_S, _AFTER_A_START_S = 2.0, 10.0
_INCARNATION_BITS = 40
_CLIENT_LO, _CLIENT_HI, _INCARNATION = range(3)
_LINE = 8
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
        self._storages: dict[str, Router] = {}
        self._mutex = threading.RLock()
        self._sessions: dict[tuple[int, int], Link] = {}  # by worker and incarnation
        self._broken_s: dict[tuple[int, int], float] = {}  # when that of one was
        self._began_s = now_s()
        self._answers: dict[int, Callable[[Request], Answer]] = {
            Operation.ENTER: self._enter,
            Operation.LEAVE: self._leave,
            Operation.TICK: self._tick,
            Operation.BARRIER: self._barrier,
            Operation.OPEN: self._open,
            Operation.GET: self._get,
            Operation.ADD: self._add,
            Operation.ARRIVE: self._arrive,
            Operation.FINISH: self._finish,
            Operation.COPY_ALL: self._copy_all,
            Operation.REPLACE_ALL: self._replace_all,
            Operation.COUNTS: self._counts,
            Operation.KEYS: self._keys,
        }

    # --- as a Service -----------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        """Do what is asked."""
        head = request.head
        answer = self._answers.get(head.operation)
        if answer is None:
            raise ConfigError(f"`operation` must be one of this version, but is {head.operation}.")
        if head.operation == Operation.ENTER:
            return answer(request)
        if not 0 <= head.worker < MAX_WORKERS:
            raise ConfigError(f"`worker` must be below {MAX_WORKERS}, but is {head.worker}.")
        if head.operation not in _READING:
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
        head, (asked, low, high, expected) = request.head, request.head.args
        with self._mutex:
            known = self._line_of_client((low, high))
            if known is None:
                if head.incarnation:  # it has been here, and was taken for lost
                    self._refuse_stale(head)
                known = self._membership.enter(
                    worker=None if asked < 0 else asked,
                    num_expected=expected or None,
                    timeout_s=_seconds(head.timeout_ms),
                    elsewhere=True,
                )
                line = self._line(known)
                line[_CLIENT_LO] = line[_CLIENT_HI] = 0
                line[_INCARNATION] = self._membership.incarnation(known)
                line[_CLIENT_LO], line[_CLIENT_HI] = low, high
            incarnation = self._line(known)[_INCARNATION]
            request.link.session = known, incarnation
            self._sessions[known, incarnation] = request.link
        return Answer((known, incarnation, self._context.barrier().num_finished))

    def ended(self, link: Link) -> None:
        """Note that a session has ended, if it has not been opened again over another one."""
        with self._mutex:
            if link.session is not None and self._sessions.get(link.session) is link:
                del self._sessions[link.session]
                self._broken_s[link.session] = now_s()

    def lose_those_without_session(self) -> None:
        """Mark workers of other hosts dead whose sessions are gone."""
        with self._mutex:
            now, unknown_s = now_s(), self._began_s + _AFTER_A_START_S - _BACK_S
            for worker in filter(self._membership.is_elsewhere, self._membership.here()):
                key = worker, self._line(worker)[_INCARNATION]
                if key not in self._sessions and now > self._broken_s.get(key, unknown_s) + _BACK_S:
                    self._membership.mark_lost(*key, _LOCK_S)

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
        self._membership.leave(
            request.head.worker, request.head.incarnation, _seconds(request.head.timeout_ms)
        )
        return Answer()

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
        timeout_s = _seconds(head.timeout_ms)
        round_ = barrier.wait(head.worker, head.text, timeout_s, finished=finished)
        return Answer((round_, barrier.num_finished))

    # --- tables -----------------------------------------------------------------------------------

    def _storage(self, name: str) -> Router:
        """Return a table's memory; a server that was started again finds it by its name."""
        found = self._storages.get(name)
        if found is None:
            spec = self._context.known_spec(name)
            if spec is None:
                raise StateError(f"Table {name!r} must be opened first, but is not.")
            found = self._storages[name] = self._context.storage(spec, _LOCK_S)
        return found

    def _open(self, request: Request) -> Answer:
        head, timeout_s = request.head, _seconds(request.head.timeout_ms)
        spec = TableSpec.from_mapping(_parsed(request.head.text))
        storage = self._storages[spec.name] = self._context.storage(spec, _LOCK_S)
        init = None
        if head.args[0]:
            init = _read_init(request.payload, spec, head.args[1])
        else:

            def somebody_else_fills_it() -> bool:
                master = min(self._membership.awaited(), default=head.worker)
                return storage.here.is_ready or master == head.worker

            self._membership.changes.wait_until(
                somebody_else_fills_it,
                timeout_s,
                lambda: self._membership.look_for_dead(timeout_s),
            )
            if not storage.here.is_ready:
                return Answer((0, 0))
        storage.open(head.worker, init, timeout_s)
        return Answer((1, storage.here.rounds.clock_of(head.worker)))

    def _rows_at(
        self, offset: int, num_rows: int, request: Request, spec: TableSpec
    ) -> tuple[Tensor | None, int]:
        """Return rows that stand in the payload, None for all, and where they end."""
        if num_rows == -1:
            return None, offset
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
        rows, _ = self._rows_at(0, head.args[0], request, spec)
        num_rows = spec.rows if rows is None else rows.numel()
        most = max(spec.rows, MAX_PAYLOAD_BYTES // (spec.cols * spec.dtype.itemsize))
        if num_rows > most:
            raise ConfigError(f"A get must be of at most {most} rows, but is of {num_rows}.")
        out = torch.empty((num_rows, spec.cols), dtype=spec.dtype, device="cpu")
        storage.read(rows, out, head.worker, _seconds(head.timeout_ms))
        return Answer(payload=[as_memory(out)])

    def _add(self, request: Request) -> Answer:
        """Make an add, or write it down for a round."""
        head, (num_rows, round_number, assigns, _) = request.head, request.head.args
        storage, timeout_s = self._storage(head.text), _seconds(head.timeout_ms)
        spec, number = storage.spec, _number_of_add(head)
        rows, offset = self._rows_at(0, num_rows, request, spec)
        shape = (spec.rows if rows is None else num_rows, spec.entry_cols(bool(assigns)))
        delta, _ = from_memory(request.payload, offset, spec.dtype, shape)
        entry = Entry(rows, delta, head.worker, bool(assigns), number=number)
        if round_number:
            storage.here.rounds.put(entry, timeout_s, round_number)
        else:
            storage.add(entry, timeout_s)
        return Answer()

    def _arrive(self, request: Request) -> Answer:
        rounds = self._storage(request.head.text).here.rounds
        rounds.arrive(request.head.worker, request.head.args[0])
        return Answer()

    def _finish(self, request: Request) -> Answer:
        head = request.head
        rounds = self._storage(head.text).here.rounds
        arrival = rounds.arrive(head.worker, head.args[0])
        rounds.finish(arrival, _seconds(head.timeout_ms))
        return Answer()

    def _copy_all(self, request: Request) -> Answer:
        parts = self._storage(request.head.text).copy_all(_seconds(request.head.timeout_ms))
        return Answer((len(parts[0]),), [as_memory(part.contiguous()) for part in parts])

    def _replace_all(self, request: Request) -> Answer:
        storage, (num_keys, num_parts, *_) = self._storage(request.head.text), request.head.args
        num_rows = num_keys if storage.spec.has_keys else storage.spec.rows
        parts = read_all(request.payload, storage.spec, num_rows, max(1, num_parts))
        storage.replace_all(parts, _seconds(request.head.timeout_ms))
        return Answer()

    def _counts(self, request: Request) -> Answer:
        storage = self._storage(request.head.text)
        num_keys = storage.num_keys() if storage.spec.has_keys else 0
        return Answer((storage.num_undone, num_keys))

    def _keys(self, request: Request) -> Answer:
        storage = self._storage(request.head.text)
        if not storage.spec.has_keys:
            raise ConfigError(f"Table {request.head.text!r} must have keys, but has rows.")
        return Answer(payload=[as_memory(storage.keys(_seconds(request.head.timeout_ms)))])


def _number_of_add(head: Head) -> int:
    """Return the number of the add that is asked for, over all incarnations."""
    most = (1 << _INCARNATION_BITS) - 1
    if not 1 <= head.number <= most:
        raise ConfigError(f"`number` must be 1 to {most} for an add, but is {head.number}.")
    return head.incarnation << _INCARNATION_BITS | head.number


def _seconds(milliseconds: int) -> float:
    return min(max(0, milliseconds) * 1e-3, _LONGEST_WAIT_S)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_init(payload: memoryview, spec: TableSpec, form: int) -> Tensor | Uniform:
    """Return what a master sends as a table's first values; see `RemotePart.open`."""
    if form == 2:  # a rule for the rows of keys
        bounds, offset = from_memory(payload, 0, torch.float64, (2,))
        seed, _ = from_memory(payload, offset, torch.int64, ())
        low, high = bounds.tolist()
        return Uniform(low, high, seed=int(seed))
    if form == 1:  # one number
        return from_memory(payload, 0, spec.dtype, ())[0]
    num_rows = 1 if spec.has_keys else spec.rows
    return from_memory(payload, 0, spec.dtype, (num_rows, spec.cols))[0]
