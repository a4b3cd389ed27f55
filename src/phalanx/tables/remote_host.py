"""The part of a run that is on another host, as a worker of this one reaches it."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from torch import Tensor

from phalanx.cluster import Connection, Endpoint, RemoteCall, Stream
from phalanx.errors import PeerTimeout, PhalanxError
from phalanx.ipc import Waiting, register_at_fork
from phalanx.tables.membership import BARRIERS, TICKS, Membership
from phalanx.tables.router import Operation
from phalanx.tables.spec import TableSpec

_REOPEN_S = 1.0
_TITLES = {each: f"`{each.name.lower().replace('_', ' ')}`" for each in Operation}


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
        """Become a worker there, of so many that were announced."""
        self._enter(num_expected or 0, timeout_s)
        self._thread.start()

    def _enter(self, num_expected: int, timeout_s: float) -> None:
        self.incarnation = self.begin_tell(timeout_s, num_expected).wait().args[0]
        self._kept = self.take_idle()  # any will do
        # A thread that has seen no connection has not said how far it is. And its next tick, which
        # is not sent again, has a connection by this.
        self.begin_tell(timeout_s).wait()

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

    def leave(self, timeout_s: float) -> None:
        """Stop counting there."""
        self.call(Operation.LEAVE, "`leave`", timeout_s)

    def begin_tell(self, timeout_s: float, num_expected: int = 0) -> RemoteCall:
        """Say how far this worker has come; the first time, it becomes a worker there."""
        title, args = "a tick" if self.incarnation else "`join`", (self._client, num_expected)
        clocks = [self._membership.clock(self.worker, each) for each in (TICKS, BARRIERS)]
        return self.begin(Operation.TELL, title, timeout_s, args=(*args, *clocks))

    # --- tables -----------------------------------------------------------------------------------

    def begin_of(
        self,
        spec: TableSpec,
        operation: Operation,
        timeout_s: float,
        *,
        text: str = "",
        **asked: Any,
    ) -> RemoteCall:
        """Ask for something of the part of a table there; see :meth:`Connection.begin`."""
        title = f"{_TITLES[operation]} of table {spec.name!r}"
        return self.begin(operation, title, timeout_s, text=text or spec.name, **asked)

    def open_part(self, spec: TableSpec, init: Tensor, timeout_s: float) -> int:
        """Open the part of a table there; return the round after which this worker begins.

        Args:
            spec: The part.
            init: What it holds at first: all rows, one number, or the first row of keys. It is
                sent where this worker turns out to be the one that fills it.
            timeout_s: How long to wait for the worker that does.
        """
        waiting, text, clock = Waiting(timeout_s), spec.to_json(), 0
        for tensors in ([], [init.contiguous()]):  # the row of keys may be an expanded number
            remaining_s = waiting.remaining_s()
            call = self.begin_of(spec, Operation.OPEN, remaining_s, text=text, tensors=tensors)
            is_open, clock, *_ = call.wait().args
            if is_open:
                break
        return clock
