"""The service of a host's server: calls of other hosts' workers, on this host's memory.

A worker of another host is a worker here, too, with the same number: it is on this host's page of
workers, has its line in every table, and its adds go through the same part and the same logs. So
rounds, clocks and barriers need to know nothing of the network. What differs: its process is
elsewhere (`Membership.is_elsewhere`), and lives as long as it has a connection, which the kernel
closes when the process dies. A worker that has none, and none again within 2 s, or 10 s after
another server has begun, is dead here. One that is halted is not.

A request may come twice. Each that must count once carries what tells a repetition:

    add                  a number, which the part keeps with the effect (part.py)
    add of a round       the same number, which the log keeps, too (log.py)
    tell, end round      the clock itself; of a new worker, a number of its own, kept on the page
                         of workers
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.clock import now_s
from phalanx.cluster import MAX_BYTES, Answer, Message, Stream
from phalanx.errors import ConfigError, StateError
from phalanx.memory import all_within
from phalanx.tables.membership import BARRIERS, MAX_WORKERS, TICKS
from phalanx.tables.own_part import OwnPart
from phalanx.tables.part import Entry
from phalanx.tables.router import Operation
from phalanx.tables.run_context import RunContext
from phalanx.tables.spec import TableSpec
from phalanx.tables.values import outside

_LOCK_S = 10.0  # a lock is held for microseconds, unless its owner is halted
_BACK_S, _AFTER_A_START_S = 2.0, 10.0
_INCARNATION_BITS = 40
_MOST_KEPT_BYTES = 32 << 20
_READING = {Operation.GET, Operation.SNAPSHOT, Operation.KEYS, Operation.NUM_KEYS}

_Kind = tuple[torch.dtype, tuple[int, ...]]


class HostService:
    """This host's tables, for workers elsewhere.

    Args:
        context: The run as this host has it.

    Attributes:
        membership: The workers of the run, on this host's page.
    """

    def __init__(self, context: RunContext) -> None:
        self.membership = context.membership
        self._context = context
        self._mutex = threading.Lock()
        self._of_thread = threading.local()
        self._connections: Counter[tuple[int, int]] = Counter()  # of a worker and incarnation
        self._ended_s: dict[tuple[int, int], float] = {}  # when the last of one did
        self._began_s = now_s()
        self._answers: dict[int, Callable[[Message], Answer]] = {
            operation: getattr(self, f"_{operation.name.lower()}") for operation in Operation
        }

    # --- as a Service -----------------------------------------------------------------------------

    def answer(self, asked: Message, stream: Stream) -> Answer:
        """Do what is asked."""
        answer = self._answers.get(asked.operation)
        if answer is None:
            raise ConfigError(f"`operation` must be one of this version, but is {asked.operation}.")
        is_new = asked.operation == Operation.TELL and not asked.incarnation
        if is_new or stream.session is None:
            asked = self._counted(asked, stream, is_new=is_new)
        if asked.operation not in _READING:
            self._refuse_stale(asked)
        return answer(asked)

    def _counted(self, asked: Message, stream: Stream, *, is_new: bool) -> Message:
        """Count a worker's connection; write a new worker down, and return its incarnation, too."""
        with self._mutex:  # else the new one were lost before its connection counts
            if is_new:
                worker, (client, num_expected, *_) = asked.worker, asked.args
                timeout_s = asked.timeout_s
                self.membership.enter(worker, num_expected or None, timeout_s, client or 1)
                asked = asked._replace(incarnation=self.membership.incarnation(worker))
            if stream.session is not None:
                self._connections[stream.session] -= 1
            stream.session = asked.worker, asked.incarnation
            self._connections[stream.session] += 1
        return asked

    def _refuse_stale(self, asked: Message) -> None:
        """Fence off a worker that was taken for dead, or whose number is another's by now."""
        worker, incarnation = asked.worker, asked.incarnation
        if worker >= MAX_WORKERS or not self.membership.is_here(worker, incarnation):
            raise StateError(
                f"Worker {worker} must be of the run, but was taken for lost on this host, "
                "or its number is another's by now. What it asked for was not done. Join again."
            )

    def ended(self, stream: Stream) -> None:
        """Note that a connection has ended."""
        if stream.session is not None:
            with self._mutex:
                self._connections[stream.session] -= 1
                self._ended_s[stream.session] = now_s()

    # --- workers ----------------------------------------------------------------------------------

    def lose_those_without_connection(self) -> None:
        """Mark workers of other hosts dead that have no connection."""
        with self._mutex:
            now, unknown_s = now_s(), self._began_s + _AFTER_A_START_S - _BACK_S
            for worker in filter(self.membership.is_elsewhere, self.membership.here()):
                key = worker, self.membership.incarnation(worker)
                if not self._connections[key] and now > self._ended_s.get(key, unknown_s) + _BACK_S:
                    self.membership.leave(*key, _LOCK_S)

    def _tell(self, asked: Message) -> Answer:
        with self._mutex:  # of two that come at once, the later one counts
            for clock, number in zip((TICKS, BARRIERS), asked.args[2:], strict=True):
                self.membership.advance_to(asked.worker, clock, number)
        return Answer((asked.incarnation,))

    def _leave(self, asked: Message) -> Answer:
        self.membership.leave(asked.worker, asked.incarnation, asked.timeout_s)
        return Answer()

    # --- tables -----------------------------------------------------------------------------------

    def _table(self, asked: Message) -> OwnPart:
        return self._context.known_part(asked.text, _LOCK_S)

    def _open(self, asked: Message) -> Answer:
        spec = TableSpec.from_json(asked.text)
        table = self._context.part(spec, _LOCK_S)
        init = _read_init(asked, spec) if asked.tensors else None
        is_open = table.open(asked.worker, init, asked.timeout_s)
        return Answer((int(is_open), table.clock_of(asked.worker)))

    def _get(self, asked: Message) -> Answer:
        table = self._table(asked)
        spec = table.spec
        rows, num_rows = _rows(asked, spec, 0)
        most = max(spec.rows, MAX_BYTES // (spec.cols * spec.dtype.itemsize))
        if num_rows > most:
            raise ConfigError(f"A get must be of at most {most} rows, but is of {num_rows}.")
        out = self._memory(num_rows * spec.cols * spec.dtype.itemsize)
        out = out.view(spec.dtype).view(num_rows, spec.cols)
        table.part.read(rows, out, asked.timeout_s)
        return Answer(tensors=[out])

    def _memory(self, nbytes: int) -> Tensor:
        """Return memory, this connection's until its next get: new pages cost as much as a copy."""
        kept: Tensor | None = getattr(self._of_thread, "memory", None)
        if kept is None or kept.nbytes < nbytes:
            kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if nbytes <= _MOST_KEPT_BYTES:
                self._of_thread.memory = kept
        return kept[:nbytes]

    def _add(self, asked: Message) -> Answer:
        """Make an add, or write it down for a round."""
        table, round_number = self._table(asked), asked.args[0]
        spec = table.spec
        rows, num_rows = _rows(asked, spec, 1)
        delta = asked.tensors[-1]
        _refuse_other([delta], [(spec.dtype, (num_rows, spec.delta_cols))])
        number = asked.incarnation << _INCARNATION_BITS | asked.number
        entry = Entry(rows, delta, asked.worker, number)
        if not round_number:
            table.part.add(entry, asked.timeout_s)
            return Answer()
        if rows is not None and not (spec.has_keys or all_within(rows, spec.rows, spec.first_row)):
            raise outside(rows, spec)
        table.put(entry, asked.timeout_s, round_number)
        return Answer()

    def _end_round(self, asked: Message) -> Answer:
        self._table(asked).arrive(asked.worker, asked.args[0])
        return Answer()

    def _await_round(self, asked: Message) -> Answer:
        self._table(asked).finish(asked.args[0], asked.timeout_s)
        return Answer()

    def _snapshot(self, asked: Message) -> Answer:
        return Answer(tensors=self._table(asked).part.copy_all(asked.timeout_s))

    def _restore(self, asked: Message) -> Answer:
        table, parts = self._table(asked), list(asked.tensors)
        num_rows = parts[0].numel() if table.spec.has_keys and parts else table.spec.rows
        _refuse_other(parts, table.spec.parts(num_rows))
        table.part.replace_all(parts, asked.timeout_s)
        return Answer()

    def _keys(self, asked: Message) -> Answer:
        return Answer(tensors=self._table(asked).part.keys(asked.timeout_s))

    def _num_keys(self, asked: Message) -> Answer:
        return Answer(tensors=self._table(asked).part.num_keys(asked.timeout_s))


# --- what a peer sends is checked -----------------------------------------------------------------


def _refuse_other(found: Any, wanted: list[_Kind]) -> None:
    """Raise if tensors are of another number, dtype or shape.

    Raises:
        ConfigError: They are.
    """
    kinds = [(each.dtype, tuple(each.shape)) for each in found]
    if kinds != wanted:
        raise ConfigError(f"What is sent must be {wanted}, but is {kinds}.")


def _rows(asked: Message, spec: TableSpec, num_others: int) -> tuple[Tensor | None, int]:
    """Return the rows that a message names before other tensors, and how many they are."""
    num_more = len(asked.tensors) - num_others
    if num_more not in ((1,) if spec.has_keys else (0, 1)):
        raise ConfigError(f"Rows, or keys, must be sent, but {len(asked.tensors)} tensors are.")
    if not num_more:
        return None, spec.rows
    rows = asked.tensors[0]
    _refuse_other([rows], [(torch.int64, (rows.numel(),))])
    return rows, rows.numel()


def _read_init(asked: Message, spec: TableSpec) -> Tensor:
    """Return what a master sends as a table's first values; see `RemoteHost.open_part`."""
    first = asked.tensors[0]
    shape = (1 if spec.has_keys else spec.rows, spec.cols) if first.dim() else ()
    _refuse_other(asked.tensors, [(spec.dtype, shape)])
    return first
