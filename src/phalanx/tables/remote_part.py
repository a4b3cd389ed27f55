"""The part of a run that is on another host, as a worker of this one reaches it."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.cluster import Array, Connection, Endpoint, Message, RemoteCall, Stream
from phalanx.errors import PeerTimeout, PhalanxError
from phalanx.ipc import Waiting, register_at_fork
from phalanx.tables.host_operations import (
    Operation,
    as_array,
    as_arrays,
    as_tensor,
)
from phalanx.tables.part import Entry
from phalanx.tables.row_initializer import Uniform
from phalanx.tables.spec import TableSpec

_REOPEN_S = 1.0


class RemoteHost:
    """Another host, as one worker of this one knows it: calls to its server, and a session.

    The session is a connection without calls, by which the server knows that the worker lives: when
    its process dies, the kernel closes it. Where it breaks, as when the server is killed, it is
    opened again.

    Args:
        endpoint: Its server.

    Attributes:
        host: Its number.
        connection: To its server.
        num_barriers: The last barrier there that this worker has passed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.host = endpoint.host
        self.connection = Connection(endpoint)
        self.num_barriers = 0
        self._client = 1 + secrets.randbits(62)
        self._opening = Connection(endpoint)  # of the session, which no call may take
        self._session: Stream | None = None
        self._thread: threading.Thread | None = None
        register_at_fork(self._forget)

    def enter(self, worker: int | None, num_expected: int | None, timeout_s: float) -> int:
        """Become a worker there, and return the number.

        Args:
            worker: The number, if it is known.
            num_expected: How many workers were announced.
            timeout_s: How long to wait for the server.
        """
        args = (-1 if worker is None else worker, self._client, num_expected or 0)
        entered, incarnation, self.num_barriers, _ = self._open_session(timeout_s, args)
        for each in (self.connection, self._opening):
            each.worker, each.incarnation = entered, incarnation
        self._thread = threading.Thread(
            target=self._keep_session, name="phalanx session", daemon=True
        )
        self._thread.start()
        return entered

    def _open_session(self, timeout_s: float, args: tuple[int, ...] = ()) -> tuple[int, ...]:
        answer = self._opening.call(Operation.ENTER, "`join`", timeout_s, args=args)
        self._session = self._opening.take_idle()
        return answer.args

    def _keep_session(self) -> None:
        while not self._opening.is_closed:
            try:
                if self._session is None:
                    self._open_session(_REOPEN_S)
                else:
                    self._session.wait_for_end()
                    self._session.close()
                    self._session = None
            except PeerTimeout:
                continue
            except PhalanxError:  # the worker was taken for lost: its next call says so
                return

    def close(self) -> None:
        """Let go of all connections; the server sees the end of the session."""
        self._opening.close()
        session = self._session
        if session is not None:
            session.shut()
        if self._thread is not None:
            self._thread.join(2 * _REOPEN_S)
        self.connection.close()

    def _forget(self) -> None:
        """Let go of the session in a forked child, which may outlive the worker."""
        if self._session is not None:
            self._session.close()

    def part(self, spec: TableSpec) -> RemotePart:
        """Return this host's part of a table, as the worker uses it; see `part_of`."""
        return RemotePart(self, spec)

    def leave(self, timeout_s: float) -> None:
        """Stop counting there."""
        self.connection.call(Operation.LEAVE, "`leave`", timeout_s)

    def tick(self, clock: int, timeout_s: float) -> None:
        """Say that this worker has ticked ``clock`` times in all."""
        self.connection.call(Operation.TICK, "a tick", timeout_s, args=(clock,))

    def wait_at_barrier(self, timeout_s: float) -> int:
        """Come to the next barrier there, wait, and return its number."""
        passed = (self.num_barriers,)
        answer = self.connection.call(Operation.BARRIER, "a barrier", timeout_s, args=passed)
        self.num_barriers = answer.args[0]
        return self.num_barriers


class RemotePart:
    """One table's part on another host.

    Calls that begin with ``begin`` send, and return what is then waited for.

    Args:
        remote: The host.
        spec: What the part is; see `part_of`.
    """

    def __init__(self, remote: RemoteHost, spec: TableSpec) -> None:
        self.remote = remote
        self.spec = spec
        self._num_adds = 0
        self._title = f"table {spec.name!r}"

    def _begin(self, operation: Operation, verb: str, timeout_s: float, **asked: Any) -> RemoteCall:
        return self.remote.connection.begin(
            operation, f"{verb} of {self._title}", timeout_s, text=self.spec.name, **asked
        )

    def _call(self, operation: Operation, verb: str, timeout_s: float, **asked: Any) -> Message:
        return self._begin(operation, verb, timeout_s, **asked).wait()

    def open(self, init: Tensor | Uniform, timeout_s: float) -> int:
        """Open the part there; return the round that this worker has arrived at.

        Args:
            init: What it holds at first: all rows, one number, a row, or a rule. It is sent where
                this worker turns out to be the one that fills it.
            timeout_s: How long to wait for the worker that does.
        """
        waiting = Waiting(timeout_s)

        def ask(arrays: Sequence[Array]) -> tuple[int, ...]:
            return self.remote.connection.call(
                Operation.OPEN,
                f"the opening of {self._title}",
                waiting.remaining_s(),
                text=json.dumps(self.spec.as_mapping()),
                arrays=arrays,
            ).args

        is_open, clock, *_ = ask([])
        return clock if is_open else ask(_written(init))[1]

    # --- reading and changing -----------------------------------------------------------------

    def begin_read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> RemoteCall:
        """Ask for rows of the part, which come into ``out``, a contiguous tensor."""
        rows_given, target = as_arrays([rows]), [as_array(out)]
        return self._begin(Operation.GET, "a get", timeout_s, arrays=rows_given, out=target)

    def begin_add(self, entry: Entry, timeout_s: float, round_number: int = 0) -> RemoteCall:
        """Send an add, checked; of a worker one at a time.

        Args:
            entry: The add.
            timeout_s: When it must have been taken.
            round_number: For which round it is written down; 0 to make it.
        """
        self._num_adds += 1
        return self._begin(
            Operation.ADD,
            "an add",
            timeout_s,
            args=(round_number,),
            number=self._num_adds,
            arrays=as_arrays([entry.rows, entry.delta]),
        )

    def begin_arrive(self, number: int, timeout_s: float) -> RemoteCall:
        """Say that all of round ``number`` has been put down."""
        return self._begin(Operation.ARRIVE, "a get", timeout_s, args=(number,))

    def begin_finish(self, number: int, timeout_s: float) -> RemoteCall:
        """Wait for round ``number``."""
        return self._begin(Operation.FINISH, "a get", timeout_s, args=(number,))

    # --- all of it ----------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; of a keys table the keys before them."""
        arrays = self._call(Operation.COPY_ALL, "a snapshot", timeout_s).arrays
        dtypes = [dtype for dtype, _ in self.spec.parts(0)]
        return [as_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by these parts, as :meth:`copy_all` returns them."""
        self._call(Operation.REPLACE_ALL, "a restore", timeout_s, arrays=as_arrays(parts))

    def num_keys(self, timeout_s: float) -> int:
        """Return how many keys there are."""
        return self._call(Operation.COUNT, "`len`", timeout_s).args[0]

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys there."""
        return as_tensor(self._call(Operation.KEYS, "`keys`", timeout_s).arrays[0], torch.int64)


def _written(init: Tensor | Uniform) -> list[Array]:
    """Return how first values are sent; see `host_service._read_init`."""
    if isinstance(init, Uniform):
        return [np.array([init.low, init.high]), np.array(init.seed)]
    return [as_array(init)]
