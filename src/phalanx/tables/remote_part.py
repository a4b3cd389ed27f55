"""The part of a run that is on another host, as a worker of this one reaches it."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
from torch import Tensor

from phalanx.cluster import Connection, Endpoint, PendingCall, Reply, WorkerSession
from phalanx.ipc import Waiting, register_at_fork
from phalanx.tables.host_operations import (
    UNKNOWN,
    Operation,
    as_memory,
    from_memory,
    read_all,
)
from phalanx.tables.part import Entry
from phalanx.tables.row_initializer import Uniform
from phalanx.tables.spec import TableSpec

__all__ = ["RemoteHost", "RemotePart"]


class RemoteHost:
    """Another host, as one worker of this one knows it.

    Args:
        endpoint: Its server.

    Attributes:
        host: Its number.
        name: What messages call it.
        connection: To its server.
        num_barriers: How many barriers were finished there when this worker last looked;
            `UNKNOWN` if it did not hear the end of its last one.
        has_left: Whether the worker was said to have left.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.host = endpoint.host
        self.name = endpoint.name
        self.connection = Connection(endpoint, 0)
        self.num_barriers = 0
        self.has_left = False
        self._session = WorkerSession(endpoint, Operation.ENTER)
        register_at_fork(self._forget)

    def enter(self, worker: int | None, num_expected: int | None, timeout_s: float) -> int:
        """Become a worker there, and return the number.

        Args:
            worker: The number, if it is known.
            num_expected: How many workers were announced.
            timeout_s: How long to wait for the server.
        """
        number = -1 if worker is None else worker
        entered, incarnation, self.num_barriers, _ = self._session.open(
            timeout_s, (number, num_expected or 0)
        )
        self.connection.worker, self.connection.incarnation = entered, incarnation
        return entered

    def close(self) -> None:
        """Let go of all connections."""
        self._session.close()
        self.connection.close()

    def _forget(self) -> None:
        """Let go of the session in a forked child, which may outlive the worker."""
        self._session.forget()

    def wait_at_barrier(self, name: str, timeout_s: float) -> int:
        """Come to the barrier of that name, wait, and return its round."""
        finished, self.num_barriers = self.num_barriers, UNKNOWN
        reply = self.connection.call(
            Operation.BARRIER, f"barrier {name!r}", timeout_s, args=(finished,), text=name
        )
        round_, self.num_barriers, *_ = reply.args
        return round_


class RemotePart:
    """One table's part on another host.

    Calls that begin with ``begin`` send, and return what `wait` takes.

    Args:
        remote: The host.
        spec: What the part is; see `part_of`.

    Attributes:
        adding: Held while an add is under way: adds are numbered, and end, one after the other.
    """

    def __init__(self, remote: RemoteHost, spec: TableSpec) -> None:
        self.remote = remote
        self.spec = spec
        self.adding = threading.Lock()
        self._num_adds = 0
        self._title = f"table {spec.name!r}"

    def wait(self, pending: PendingCall) -> Reply:
        """Wait for the answer of a call that was begun."""
        return self.remote.connection.wait(pending)

    def abandon(self, pending: PendingCall) -> None:
        """Let the answer of a call that was begun go nowhere, if it is not there yet."""
        self.remote.connection.abandon(pending)

    def _begin(
        self, operation: Operation, verb: str, timeout_s: float, **asked: Any
    ) -> PendingCall:
        return self.remote.connection.begin(
            operation, f"{verb} of {self._title}", timeout_s, text=self.spec.name, **asked
        )

    def _call(self, operation: Operation, verb: str, timeout_s: float, **asked: Any) -> Reply:
        return self.wait(self._begin(operation, verb, timeout_s, **asked))

    def open(self, init: Tensor | Uniform, timeout_s: float) -> int:
        """Open the part there; return the round that this worker has arrived at.

        Args:
            init: What it holds at first: all rows, one number, a row, or a rule. It is sent where
                this worker turns out to be the one that fills it.
            timeout_s: How long to wait for the worker that does.
        """
        waiting = Waiting(timeout_s)
        form, sent = _written(init)

        def ask(given: bool) -> tuple[int, ...]:
            return self.remote.connection.call(
                Operation.OPEN,
                f"the opening of {self._title}",
                waiting.remaining_s(),
                args=(int(given), form),
                text=json.dumps(self.spec.as_mapping()),
                payload=[as_memory(part) for part in sent] if given else [],
            ).args

        is_open, clock, *_ = ask(given=False)
        return clock if is_open else ask(given=True)[1]

    # --- reading and changing -----------------------------------------------------------------

    def begin_read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> PendingCall:
        """Ask for rows of the part, which come into ``out``, a contiguous tensor."""
        return self._begin(
            Operation.GET,
            "a get",
            timeout_s,
            args=(_count(rows),),
            payload=[] if rows is None else [as_memory(rows.contiguous())],
            out=[as_memory(out)],
        )

    def begin_add(self, entry: Entry, timeout_s: float, round_number: int = 0) -> PendingCall:
        """Send an add, checked. `adding` is held.

        Args:
            entry: The add.
            timeout_s: When it must have been taken.
            round_number: For which round it is written down; 0 to make it.
        """
        parts = [entry.delta] if entry.rows is None else [entry.rows, entry.delta]
        self._num_adds += 1
        return self._begin(
            Operation.ADD,
            "an add",
            timeout_s,
            args=(_count(entry.rows), round_number, int(entry.assigns)),
            number=self._num_adds,
            payload=[as_memory(part.contiguous()) for part in parts],
        )

    def begin_arrive(self, number: int, timeout_s: float) -> PendingCall:
        """Say that all of round ``number`` has been put down."""
        return self._begin(Operation.ARRIVE, "a get", timeout_s, args=(number,))

    def begin_finish(self, number: int, timeout_s: float) -> PendingCall:
        """Wait for round ``number``."""
        return self._begin(Operation.FINISH, "a get", timeout_s, args=(number,))

    # --- all of it ----------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; of a keys table the keys before them."""
        reply = self._call(Operation.COPY_ALL, "a snapshot", timeout_s, out=None)
        return read_all(reply.payload, self.spec, reply.args[0])

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by these parts, as :meth:`copy_all` returns them."""
        values = parts[1:] if self.spec.has_keys else parts
        self._call(
            Operation.REPLACE_ALL,
            "a restore",
            timeout_s,
            args=(len(parts[0]), len(values)),
            payload=[as_memory(part.contiguous()) for part in parts],
        )

    def num_undone(self, timeout_s: float) -> int:
        """Return how many adds were undone there."""
        return self._call(Operation.COUNTS, "`stats`", timeout_s).args[0]

    def num_keys(self, timeout_s: float) -> int:
        """Return how many keys there are."""
        return self._call(Operation.COUNTS, "`len`", timeout_s).args[1]

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys there."""
        reply = self._call(Operation.KEYS, "`keys`", timeout_s, out=None)
        return from_memory(reply.payload, 0, torch.int64, (len(reply.payload) // 8,))[0]


def _count(rows: Tensor | None) -> int:
    return -1 if rows is None else rows.numel()


def _written(init: Tensor | Uniform) -> tuple[int, list[Tensor]]:
    """Return how first values are sent; see `host_service._read_init`."""
    if isinstance(init, Uniform):
        bounds = torch.tensor([init.low, init.high], dtype=torch.float64, device="cpu")
        return 2, [bounds, torch.tensor(init.seed, dtype=torch.int64, device="cpu")]
    return (1 if init.dim() == 0 else 0), [init.contiguous()]
