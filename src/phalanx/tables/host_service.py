"""What a host's server does for workers of other hosts: their calls, on this host's memory.

A worker of another host is a worker here, too, with the same number: it is on this host's page of
workers, has its line in every table, and its adds go through the same part and the same logs. So
rounds, clocks and barriers need to know nothing of the network. What differs: its process is
elsewhere (`Membership.is_elsewhere`), and lives as long as its session does, a connection that the
kernel closes when the process dies. A worker whose session is gone and not back within 2 s, or 10 s
after another server has begun, is dead here. One that is halted is not.

A request may come twice. Each that must count once carries what tells a repetition:

    add                  a number, which the part keeps with the effect (part.py)
    add of a round       the same number, which the log keeps, too (log.py)
    tick, arrive         the clock itself
    barrier              the last one that the worker has passed
    enter                a number of the client's, kept on the page of workers
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.clock import now_s
from phalanx.cluster import MAX_ARRAY_BYTES, Answer, Message, Stream
from phalanx.errors import ConfigError, StateError
from phalanx.memory import all_within
from phalanx.tables.host_operations import (
    Operation,
    as_array,
    as_arrays,
    as_tensor,
)
from phalanx.tables.membership import MAX_WORKERS
from phalanx.tables.own_part import OwnPart
from phalanx.tables.part import Entry
from phalanx.tables.row_initializer import Uniform
from phalanx.tables.run_context import RunContext
from phalanx.tables.spec import TableSpec

_LOCK_S = 10.0  # a lock is held for microseconds, unless its owner is halted
_LONGEST_WAIT_S = 1e5
_BACK_S, _AFTER_A_START_S = 2.0, 10.0
_INCARNATION_BITS = 40
_READING = {Operation.GET, Operation.COPY_ALL, Operation.COUNT, Operation.KEYS}


class HostService:
    """This host's tables, for workers elsewhere.

    Args:
        context: The run as this host has it.

    Attributes:
        membership: The workers of the run, on this host's page.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.membership = context.membership
        self._tables: dict[str, OwnPart] = {}
        self._mutex = threading.RLock()
        self._sessions: Counter[tuple[int, int]] = Counter()  # of a worker and incarnation
        self._broken_s: dict[tuple[int, int], float] = {}  # when that of one was
        self._began_s = now_s()
        self._answers: dict[int, Callable[[Message], Answer]] = {
            operation: getattr(self, f"_{operation.name.lower()}")
            for operation in Operation
            if operation != Operation.ENTER
        }

    # --- as a Service -----------------------------------------------------------------------------

    def answer(self, asked: Message, stream: Stream) -> Answer:
        """Do what is asked."""
        answer = self._answers.get(asked.operation)
        if asked.operation == Operation.ENTER:
            return self._enter(asked, stream)
        if answer is None:
            raise ConfigError(f"`operation` must be one of this version, but is {asked.operation}.")
        if asked.operation not in _READING:
            self._refuse_stale(asked)
        return answer(asked)

    def _refuse_stale(self, asked: Message) -> None:
        """Fence off a worker that was taken for dead, or whose number is another's by now."""
        worker, incarnation = asked.worker, asked.incarnation
        if worker >= MAX_WORKERS or not self.membership.is_here(worker, incarnation):
            raise StateError(
                f"Worker {worker} must be of the run, but was taken for lost on this host, "
                "or its number is another's by now. What it asked for was not done. Join again."
            )

    # --- workers ----------------------------------------------------------------------------------

    def _enter(self, asked: Message, stream: Stream) -> Answer:
        number, client, expected, *_ = asked.args
        with self._mutex:
            worker = asked.worker
            if asked.incarnation:  # its session broke
                self._refuse_stale(asked)
            else:
                worker = self.membership.enter(
                    worker=None if number < 0 else number,
                    num_expected=expected or None,
                    timeout_s=_seconds(asked),
                    client=client or 1,
                )
            stream.session = worker, self.membership.incarnation(worker)
            self._sessions[stream.session] += 1
        return Answer((*stream.session, self.membership.num_barriers))

    def ended(self, stream: Stream) -> None:
        """Note that a connection has ended; where it was a worker's session, that counts."""
        if stream.session is not None:
            with self._mutex:
                self._sessions[stream.session] -= 1
                self._broken_s[stream.session] = now_s()

    def lose_those_without_session(self) -> None:
        """Mark workers of other hosts dead whose sessions are gone."""
        with self._mutex:
            now, unknown_s = now_s(), self._began_s + _AFTER_A_START_S - _BACK_S
            for worker in filter(self.membership.is_elsewhere, self.membership.here()):
                key = worker, self.membership.incarnation(worker)
                if not self._sessions[key] and now > self._broken_s.get(key, unknown_s) + _BACK_S:
                    self.membership.mark_lost(*key, _LOCK_S)

    def _leave(self, asked: Message) -> Answer:
        self.membership.leave(asked.worker, asked.incarnation, _seconds(asked))
        return Answer()

    def _tick(self, asked: Message) -> Answer:
        self.membership.advance_to(asked.worker, asked.args[0])
        return Answer()

    def _barrier(self, asked: Message) -> Answer:
        wait = self.membership.wait_at_barrier
        return Answer((wait(asked.worker, _seconds(asked), asked.args[0]),))

    # --- tables -----------------------------------------------------------------------------------

    def _table(self, name: str) -> OwnPart:
        """Return a table's memory; a server that was started again finds it by its name."""
        found = self._tables.get(name)
        if found is None:
            spec = self._context.known_spec(name)
            if spec is None:
                raise StateError(f"Table {name!r} must be opened first, but is not.")
            found = self._tables[name] = self._context.part(spec, _LOCK_S)
        return found

    def _part(self, asked: Message) -> Any:  # Any: a `KeyPart` has more methods than a `TablePart`
        return self._table(asked.text).part

    def _open(self, asked: Message) -> Answer:
        spec, timeout_s = TableSpec.from_mapping(_parsed(asked.text)), _seconds(asked)
        table = self._tables[spec.name] = self._context.part(spec, _LOCK_S)
        init = _read_init(asked, spec) if asked.arrays else None
        if not table.open(asked.worker, init, timeout_s):
            return Answer((0, 0))
        return Answer((1, table.rounds.clock_of(asked.worker)))

    def _get(self, asked: Message) -> Answer:
        table = self._table(asked.text)
        spec = table.spec
        rows = _rows(asked, spec) if asked.arrays else None
        num_rows = spec.rows if rows is None else rows.numel()
        most = max(spec.rows, MAX_ARRAY_BYTES // (spec.cols * spec.dtype.itemsize))
        if num_rows > most:
            raise ConfigError(f"A get must be of at most {most} rows, but is of {num_rows}.")
        out = torch.empty((num_rows, spec.cols), dtype=spec.dtype, device="cpu")
        table.part.read(rows, out, _seconds(asked))
        return Answer(arrays=[as_array(out)])

    def _add(self, asked: Message) -> Answer:
        """Make an add, or write it down for a round."""
        table, round_number = self._table(asked.text), asked.args[0]
        spec, number = table.spec, _number_of_add(asked)
        rows = _rows(asked, spec) if len(asked.arrays) > 1 else None
        shape = (spec.rows if rows is None else rows.numel(), spec.delta_cols)
        delta = _given(asked, -1, spec.dtype, shape)
        entry = Entry(rows, delta, asked.worker, number)
        if round_number:
            table.rounds.put(entry, _seconds(asked), round_number)
        else:
            table.part.add(entry, _seconds(asked))
        return Answer()

    def _arrive(self, asked: Message) -> Answer:
        self._table(asked.text).rounds.arrive(asked.worker, asked.args[0])
        return Answer()

    def _finish(self, asked: Message) -> Answer:
        rounds = self._table(asked.text).rounds
        rounds.finish(rounds.arrive(asked.worker, asked.args[0]), _seconds(asked))
        return Answer()

    def _copy_all(self, asked: Message) -> Answer:
        return Answer(arrays=as_arrays(self._part(asked).copy_all(_seconds(asked))))

    def _replace_all(self, asked: Message) -> Answer:
        spec = self._table(asked.text).spec
        num_rows = asked.arrays[0].size if spec.has_keys and asked.arrays else spec.rows
        wanted = spec.parts(num_rows)
        if len(asked.arrays) != len(wanted):
            raise ConfigError(
                f"A restore must have {len(wanted)} arrays, but has {len(asked.arrays)}."
            )
        parts = [_given(asked, i, *each) for i, each in enumerate(wanted)]
        self._part(asked).replace_all(parts, _seconds(asked))
        return Answer()

    def _count(self, asked: Message) -> Answer:
        part, has_keys = self._part(asked), self._table(asked.text).spec.has_keys
        return Answer((part.num_keys(_seconds(asked)) if has_keys else 0,))

    def _keys(self, asked: Message) -> Answer:
        if not self._table(asked.text).spec.has_keys:
            raise ConfigError(f"Table {asked.text!r} must have keys, but has rows.")
        return Answer(arrays=[as_array(self._part(asked).keys(_seconds(asked)))])


def _given(asked: Message, index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return one of a message's arrays; the dtype and shape of what a peer sends are checked.

    Raises:
        ConfigError: It is of another dtype or shape.
    """
    wanted = as_array(torch.empty(0, dtype=dtype, device="cpu")).dtype
    array = asked.arrays[index]
    if array.dtype != wanted or array.shape != shape:
        raise ConfigError(
            f"What is sent must be {dtype} of shape {shape}, but is {array.dtype} of {array.shape}."
        )
    return as_tensor(array, dtype)


def _rows(asked: Message, spec: TableSpec) -> Tensor:
    """Return the rows that a message names first."""
    rows = _given(asked, 0, torch.int64, (asked.arrays[0].size,))
    if not spec.has_keys and not all_within(rows, spec.rows, spec.first_row):
        raise ConfigError(
            f"`rows` must be within this host's part of table {spec.name!r}, which has "
            f"{spec.rows} rows from row {spec.first_row} on, but are not."
        )
    return rows


def _number_of_add(asked: Message) -> int:
    """Return the number of the add that is asked for, over all incarnations."""
    most = (1 << _INCARNATION_BITS) - 1
    if not 1 <= asked.number <= most:
        raise ConfigError(f"`number` must be 1 to {most} for an add, but is {asked.number}.")
    return asked.incarnation << _INCARNATION_BITS | asked.number


def _seconds(asked: Message) -> float:
    return min(asked.timeout_ms * 1e-3, _LONGEST_WAIT_S)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_init(asked: Message, spec: TableSpec) -> Tensor | Uniform:
    """Return what a master sends as a table's first values; see `RemotePart.open`."""
    if len(asked.arrays) > 1:  # a rule for the rows of keys
        low, high = _given(asked, 0, torch.float64, (2,)).tolist()
        return Uniform(low, high, seed=int(_given(asked, 1, torch.int64, ())))
    num_rows = 1 if spec.has_keys else spec.rows
    shape = (num_rows, spec.cols) if asked.arrays[0].ndim else ()
    return _given(asked, 0, spec.dtype, shape)
