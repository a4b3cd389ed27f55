"""A run on several hosts, as one process of it sees it: its own host's memory, and the others'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx.cluster import Endpoint
from phalanx.errors import PhalanxError, StateError, UnsupportedError
from phalanx.ipc import Waiting
from phalanx.tables.cut import part_of
from phalanx.tables.host_operations import Operation
from phalanx.tables.host_server import ServerWatch
from phalanx.tables.membership import Membership
from phalanx.tables.remote_part import RemoteHost, RemotePart
from phalanx.tables.router import RemoteParts, Router
from phalanx.tables.run_context import RunContext
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec

_LEAVE_S = 5.0
_CALL_S = 30.0


class ContextOnHosts(RunContext):
    """As a :class:`RunContext`, of a run on several hosts: each worker is one on all of them.

    Args:
        run: The run's name on this host.
        host: This host's number.
        meet: Finds the servers of all hosts, by number, where this one's regions are there, and
            begins to watch over this one's server.
    """

    def __init__(
        self,
        run: str,
        host: int,
        meet: Callable[[RunRegions], tuple[Sequence[Endpoint], ServerWatch]],
    ) -> None:
        self._meet = meet
        self._connecting = threading.Lock()
        self._remotes: dict[int, list[RemoteHost]] = {}  # by worker, in the order of hosts
        super().__init__(run, create=True)
        self._host, self._num_hosts = host, len(self._endpoints)

    def _open_membership(self, create: bool) -> Membership:
        self._endpoints, self._watch = self._meet(self.regions)
        return super()._open_membership(create)

    def remotes_of(self, worker: int) -> list[RemoteHost]:
        """Return the other hosts, as a worker of this process knows them.

        Raises:
            StateError: It has closed.
        """
        remotes = self._remotes.get(worker)
        if remotes is None:
            raise StateError(
                f"A worker must be of the run, but worker {worker} has closed. Let its calls end "
                "before `close()`."
            )
        return remotes

    # --- workers ----------------------------------------------------------------------------------

    def enter(self, worker: int | None, num_expected: int | None, timeout_s: float) -> int:
        """Become a worker on every host; the first host gives the numbers out."""
        waiting = Waiting(timeout_s)
        remotes = [RemoteHost(each) for each in self._endpoints if each.host != self._host]
        others = list(remotes)
        try:
            if worker is None and self._host != 0:
                worker = others.pop(0).enter(None, num_expected, waiting.remaining_s())
            number = super().enter(worker, num_expected, timeout_s)
            try:
                for remote in others:
                    remote.enter(number, num_expected, waiting.remaining_s())
            except BaseException:
                super().leave(number, self.membership.incarnation(number), timeout_s)
                raise
        except BaseException:
            for remote in remotes:  # those that it has entered see the end
                remote.close()
            raise
        with self._connecting:
            self._remotes[number] = remotes
        return number

    def leave(self, worker: int, incarnation: int, timeout_s: float) -> None:
        """Stop counting ``worker`` on all hosts; one that does not answer finds out by itself."""
        super().leave(worker, incarnation, timeout_s)
        for remote in self.remotes_of(worker):
            with suppress(PhalanxError):
                remote.connection.call(Operation.LEAVE, "`leave`", min(timeout_s, _LEAVE_S))

    def tick(self, worker: int) -> int:
        """Count a tick of ``worker`` on all hosts."""
        clock = super().tick(worker)
        for remote in self.remotes_of(worker):
            remote.connection.call(Operation.TICK, "a tick", _CALL_S, args=(clock,))
        return clock

    def wait_at_barrier(self, worker: int, timeout_s: float) -> int:
        """Come to the first host's barrier, where all workers come, and wait for the others."""
        if self._host == 0:
            return super().wait_at_barrier(worker, timeout_s)
        return self.remotes_of(worker)[0].wait_at_barrier(timeout_s)

    # --- tables -----------------------------------------------------------------------------------

    def storage(self, spec: TableSpec, timeout_s: float) -> Router:
        """Return the table's memory on all hosts.

        Raises:
            UnsupportedError: Its updater is none of ours.
        """
        if type(spec.updater).__module__.partition(".")[0] != __name__.partition(".")[0]:
            raise UnsupportedError(
                "`updater` must be a built-in one for tables on several hosts, but is "
                f"{spec.updater!r}. Servers run no code of yours."
            )
        return super().storage(spec, timeout_s)

    def _remote_parts(self, spec: TableSpec) -> RemoteParts:
        def parts(worker: int) -> list[RemotePart]:
            return [
                RemotePart(remote, part_of(spec, remote.host, self._num_hosts))
                for remote in self.remotes_of(worker)
            ]

        return parts

    # --- the end ----------------------------------------------------------------------------------

    def count_out(self, group: object, worker: int, timeout_s: float) -> None:
        """As :meth:`RunContext.count_out`; the worker's connections go with it."""
        super().count_out(group, worker, timeout_s)
        with self._connecting:
            remotes = self._remotes.pop(worker, [])
        for remote in remotes:
            remote.close()

    def close(self, timeout_s: float) -> None:
        """Let go of this host's memory and of the connections."""
        self._watch.close(timeout_s)
        super().close(timeout_s)
        for remotes in self._remotes.values():
            for remote in remotes:
                remote.close()
        self._remotes = {}
