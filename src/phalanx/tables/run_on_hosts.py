"""A run on several hosts, as one process of it sees it: its own host's memory, and the others'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx.cluster import Endpoint
from phalanx.errors import PhalanxError, StateError, UnsupportedError
from phalanx.ipc import Region, Waiting
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
_LOCK_S = 30.0


class OtherHosts:
    """The servers of the other hosts, and the connections of this process's workers to them.

    Args:
        me: This host's number.
        endpoints: Of all hosts, by number.
    """

    def __init__(self, me: int, endpoints: Sequence[Endpoint]) -> None:
        self.me = me
        self.num_hosts = len(endpoints)
        self._endpoints = [each for each in endpoints if each.host != me]
        self._mutex = threading.Lock()
        self._remotes: dict[int, dict[int, RemoteHost]] = {}

    def connect(self) -> dict[int, RemoteHost]:
        """Return new connections to all of them, by host, for a worker without a number yet."""
        return {endpoint.host: RemoteHost(endpoint) for endpoint in self._endpoints}

    def keep(self, worker: int, remotes: dict[int, RemoteHost]) -> None:
        """Keep the connections of a worker that has entered."""
        with self._mutex:
            self._remotes[worker] = remotes

    def of(self, worker: int) -> dict[int, RemoteHost]:
        """Return the connections of a worker.

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

    def forget(self, worker: int) -> None:
        """Let go of the connections of a worker that has closed."""
        with self._mutex:
            remotes = self._remotes.pop(worker, {})
        for remote in remotes.values():
            remote.close()

    def close(self) -> None:
        """Let go of all sockets."""
        for remotes in self._remotes.values():
            for remote in remotes.values():
                remote.close()
        self._remotes = {}


class MembershipOnHosts(Membership):
    """This host's page of workers; what they say of themselves goes to the other hosts', too.

    Args:
        region: As for :class:`Membership`.
        label: The run.
        others: The other hosts.
    """

    def __init__(self, region: Region, label: str, others: OtherHosts) -> None:
        super().__init__(region, label)
        self._others = others

    def enter(
        self,
        *,
        worker: int | None,
        num_expected: int | None,
        timeout_s: float,
        elsewhere: bool = False,
    ) -> int:
        """Write a new worker down on every host's page; the first host gives the numbers out."""
        waiting, remotes = Waiting(timeout_s), self._others.connect()
        others = list(remotes.values())
        try:
            if worker is None and self._others.me != 0:
                worker = others.pop(0).enter(None, num_expected, waiting.remaining_s())
            number = super().enter(
                worker=worker, num_expected=num_expected, timeout_s=timeout_s, elsewhere=elsewhere
            )
            try:
                for remote in others:
                    remote.enter(number, num_expected, waiting.remaining_s())
            except BaseException:
                super().leave(number, self.incarnation(number), timeout_s)
                raise
        except BaseException:
            for remote in remotes.values():  # those that it has entered see the end
                remote.close()
            raise
        self._others.keep(number, remotes)
        return number

    def leave(self, worker: int, incarnation: int, timeout_s: float) -> None:
        """Stop counting ``worker`` on all hosts; one that does not answer finds out by itself."""
        super().leave(worker, incarnation, timeout_s)
        for remote in self._others.of(worker).values():
            with suppress(PhalanxError):
                remote.connection.call(Operation.LEAVE, "`leave`", min(timeout_s, _LEAVE_S))
            remote.has_left = True

    def advance(self, worker: int) -> int:
        """Count a tick of ``worker`` on all hosts."""
        clock = super().advance(worker)
        for remote in self._others.of(worker).values():
            remote.connection.call(Operation.TICK, "a tick", _LOCK_S, args=(clock,))
        return clock


class ContextOnHosts(RunContext):
    """As a :class:`RunContext`, of a run on several hosts.

    Args:
        run: The run's name on this host.
        meet: Finds the other hosts, where this one's regions are there, and begins to watch over
            this one's server.
    """

    def __init__(
        self, run: str, meet: Callable[[RunRegions], tuple[OtherHosts, ServerWatch]]
    ) -> None:
        self._meet = meet
        super().__init__(run, create=True)
        self._host, self._num_hosts = self._others.me, self._others.num_hosts

    def _open_membership(self, create: bool) -> Membership:
        self._others, self._watch = self._meet(self.regions)
        page = self.regions.open_region("members", Membership.needed_bytes(), create=create)
        return MembershipOnHosts(page, str(self.run), self._others)

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
            remotes = self._others.of(worker)
            return [
                RemotePart(remotes[host], part_of(spec, host, self._num_hosts))
                for host in sorted(remotes)
            ]

        return parts

    def wait_at_barrier(self, worker: int, name: str, timeout_s: float) -> int:
        """Come to the first host's barrier, where all workers come, and wait for the others."""
        if self._host == 0:
            return super().wait_at_barrier(worker, name, timeout_s)
        return self._others.of(worker)[0].wait_at_barrier(name, timeout_s)

    def count_out(self, group: object, worker: int, timeout_s: float) -> None:
        """As :meth:`RunContext.count_out`; the worker's connections go with it."""
        super().count_out(group, worker, timeout_s)
        self._others.forget(worker)

    def close(self, timeout_s: float) -> None:
        """Let go of this host's memory and of the connections."""
        self._watch.close(timeout_s)
        super().close(timeout_s)
        self._others.close()
