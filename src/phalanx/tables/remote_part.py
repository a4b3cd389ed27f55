"""The part of a run that is on another host, as a worker of this one reaches it."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from phalanx.cluster import Connection, Endpoint, Message, RemoteCall, Stream
from phalanx.errors import PeerTimeout, PhalanxError
from phalanx.ipc import Waiting, register_at_fork
from phalanx.tables.cut import part_of
from phalanx.tables.membership import BARRIERS, TICKS, Membership
from phalanx.tables.part import Entry
from phalanx.tables.row_initializer import Uniform
from phalanx.tables.spec import TableSpec

_REOPEN_S = 1.0


class Operation(IntEnum):
    """A request. What each has in its message's numbers, its text and its tensors:

    text is the table's name; no rows are all rows; answers in brackets.
    """

    ENTER = 1  # client, number expected, ticks, barriers  [incarnation]
    LEAVE = 2
    TELL = 3  # ticks, barriers
    OPEN = 4  # text: spec  tensors: first values, or a rule's bounds and seed  [done]
    GET = 5  # tensors: rows  [their values]
    ADD = 6  # round or 0  number: its own  tensors: rows, delta
    ARRIVE = 7  # round
    FINISH = 8  # round
    COPY_ALL = 9  # [tensors: of a keys table the keys; values, states]
    REPLACE_ALL = 10  # tensors: as of COPY_ALL
    COUNT = 11  # [keys]
    KEYS = 12  # [tensor: keys]


class RemoteHost(Connection):
    """Another host, as one worker of this one knows it.

    The worker counts there as long as it has a connection, which the kernel closes when its process
    dies. So one is kept without calls, and opened again where it breaks, as when the server is
    killed. Each new one says how far the worker has come.

    Args:
        endpoint: Its server.
        worker: The worker.
        membership: The page that says how far the worker has come.
    """

    def __init__(self, endpoint: Endpoint, worker: int, membership: Membership) -> None:
        super().__init__(endpoint)
        self.worker = worker
        self._membership = membership
        self._client = 1 + secrets.randbits(62)
        self._kept: Stream | None = None
        self._thread = threading.Thread(target=self._keep, name="phalanx session", daemon=True)
        register_at_fork(self.forget)

    def enter(self, num_expected: int | None, timeout_s: float) -> None:
        """Become a worker there.

        Args:
            num_expected: How many workers were announced.
            timeout_s: How long to wait for the server.
        """
        self._enter(num_expected or 0, timeout_s)
        self._thread.start()

    def _enter(self, num_expected: int, timeout_s: float) -> None:
        told = self._clocks()
        args = (self._client, num_expected, *told)
        answer = self.call(Operation.ENTER, "`join`", timeout_s, args=args)
        self.incarnation = answer.args[0]
        self._kept = self.take_idle()  # any will do
        if self._clocks() != told:  # by a thread that has seen no connection
            self.begin_tell(timeout_s).wait()

    def _clocks(self) -> tuple[int, int]:
        clock = self._membership.clock
        return clock(self.worker, TICKS), clock(self.worker, BARRIERS)

    def _keep(self) -> None:
        while not self.is_closed:
            try:
                if self._kept is None:
                    self._enter(0, _REOPEN_S)
                else:
                    self._kept.wait_for_end()
                    self._kept.close()
                    self._kept = None
            except PeerTimeout:
                continue
            except PhalanxError:  # the worker was taken for lost: its next call says so
                return

    @property
    def is_reached(self) -> bool:
        """True where there is a connection; else the next one says how far the worker has come."""
        return self._kept is not None

    def close(self) -> None:
        """Let go of all connections; the server sees that the worker is gone."""
        super().close()
        kept = self._kept
        if kept is not None:
            kept.shut()
        if self._thread.is_alive():
            self._thread.join(2 * _REOPEN_S)

    def forget(self) -> None:
        """Let go of all connections in a forked child, which may outlive the worker."""
        super().close()
        if self._kept is not None:
            self._kept.close()

    def part(self, spec: TableSpec, num_hosts: int) -> RemotePart:
        """Return this host's part of a table, as the worker uses it."""
        return RemotePart(self, part_of(spec, self.endpoint.host, num_hosts))

    def leave(self, timeout_s: float) -> None:
        """Stop counting there."""
        self.call(Operation.LEAVE, "`leave`", timeout_s)

    def begin_tell(self, timeout_s: float) -> RemoteCall:
        """Say how far this worker has come."""
        return self.begin(Operation.TELL, "a tick", timeout_s, args=self._clocks())


class RemotePart:
    """One table's part on another host.

    Calls that begin with ``begin`` send, and return what is then waited for.

    Args:
        remote: The host.
        spec: What the part is; see `part_of`.
    """

    def __init__(self, remote: RemoteHost, spec: TableSpec) -> None:
        self.spec = spec
        self._remote = remote
        self._num_adds = 0
        self._title = f"table {spec.name!r}"

    def _begin(self, operation: Operation, verb: str, timeout_s: float, **asked: Any) -> RemoteCall:
        return self._remote.begin(
            operation, f"{verb} of {self._title}", timeout_s, text=self.spec.name, **asked
        )

    def _call(self, operation: Operation, verb: str, timeout_s: float, **asked: Any) -> Message:
        return self._begin(operation, verb, timeout_s, **asked).wait()

    def open(self, init: Tensor | Uniform, timeout_s: float) -> None:
        """Open the part there.

        Args:
            init: What it holds at first: all rows, one number, a row, or a rule. It is sent where
                this worker turns out to be the one that fills it.
            timeout_s: How long to wait for the worker that does.
        """
        waiting, title = Waiting(timeout_s), f"the opening of {self._title}"
        text = json.dumps(self.spec.as_mapping())
        for tensors in ([], _written(init)):
            answer = self._remote.call(
                Operation.OPEN, title, waiting.remaining_s(), text=text, tensors=tensors
            )
            if answer.args[0]:
                return

    # --- reading and changing ---------------------------------------------------------------------

    def begin_read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> RemoteCall:
        """Ask for rows of the part, which come into ``out``, a contiguous tensor."""
        given = [] if rows is None else [rows]
        return self._begin(Operation.GET, "a get", timeout_s, tensors=given, out=[out])

    def begin_add(self, entry: Entry, timeout_s: float, round_number: int = 0) -> RemoteCall:
        """Send an add, checked; of a worker one at a time.

        Args:
            entry: The add.
            timeout_s: When it must have been taken.
            round_number: For which round it is written down; 0 to make it.
        """
        self._num_adds += 1
        given = [each for each in (entry.rows, entry.delta) if each is not None]
        args, number = (round_number,), self._num_adds
        return self._begin(
            Operation.ADD, "an add", timeout_s, args=args, number=number, tensors=given
        )

    def begin_arrive(self, number: int, timeout_s: float) -> RemoteCall:
        """Say that all of round ``number`` has been put down."""
        return self._begin(Operation.ARRIVE, "a get", timeout_s, args=(number,))

    def begin_finish(self, number: int, timeout_s: float) -> RemoteCall:
        """Wait for round ``number``."""
        return self._begin(Operation.FINISH, "a get", timeout_s, args=(number,))

    # --- all of it --------------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> Sequence[Tensor]:
        """Return copies of the values and of each state; of a keys table the keys before them."""
        return self._call(Operation.COPY_ALL, "a snapshot", timeout_s).tensors

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by these parts, as :meth:`copy_all` returns them."""
        self._call(Operation.REPLACE_ALL, "a restore", timeout_s, tensors=parts)

    def num_keys(self, timeout_s: float) -> int:
        """Return how many keys there are."""
        return self._call(Operation.COUNT, "`len`", timeout_s).args[0]

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys there."""
        return self._call(Operation.KEYS, "`keys`", timeout_s).tensors[0]


def _written(init: Tensor | Uniform) -> list[Tensor]:
    """Return how first values are sent; see `host_service._read_init`."""
    if not isinstance(init, Uniform):
        return [init.contiguous()]  # a row of keys may be one number, expanded
    bounds = torch.tensor([init.low, init.high], dtype=torch.float64, device="cpu")
    return [bounds, torch.tensor(init.seed, dtype=torch.int64, device="cpu")]
