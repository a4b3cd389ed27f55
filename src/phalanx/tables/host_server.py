"""The server of one host: a process that serves the rows of this host to the others.

    worker ──forks──► server ──every worker has left──► ended
      ▲                  │
      └─────is killed────┘

The memory belongs to the host: a server that is killed loses nothing. Each worker process of the
host looks whether the server lives; the first to miss it forks the next one, which maps the same
memory and takes the same address, so nobody has to be told. A fork needs no import of torch, so it
listens after some milliseconds. It keeps the memory that its parent had at that moment, as far as
the parent writes there later.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import NamedTuple

import torch

from phalanx.clock import now_s, pause
from phalanx.cluster import Secret, Server, tag_of
from phalanx.errors import PeerTimeout, PhalanxError
from phalanx.ipc import Mutex, ProcessIdentity, fork_apart, wait_until
from phalanx.tables.host_service import HostService
from phalanx.tables.membership import Membership
from phalanx.tables.run_context import RunContext
from phalanx.tables.run_regions import RunRegions

_log = logging.getLogger(__name__)

_NOBODY_HERE_S = 120.0
_OVER_S = 1.0
_LOCK_S = 10.0
_LOOK_S, _AGAIN_S = 0.05, 1.0
_BEGIN_S = 10.0  # a fork that does not listen by then is replaced by another
_PAGE_BYTES = 4096
_LOCKS = _PAGE_BYTES - 2 * Mutex.NBYTES
_SERVER, _OVER, _ADDRESS = 0, 2, 3  # words
_ADDRESS_AT = 64


class ServerSpec(NamedTuple):
    """What a server has to know.

    Attributes:
        run: Name of the run on this host.
        host: The host's number.
        cluster: Name of the run, the same on all hosts.
        bind: The address of the network interface that it listens at.
        secret: The run's secret; None for a network that is trusted.
        starter: The process that wants it, to be a worker: if it dies before, the run has failed.
    """

    run: str
    host: int
    cluster: str
    bind: str
    secret: Secret | None
    starter: ProcessIdentity


class ServerPage:
    """A page of shared memory: who serves this host, and where.

        words of 8 bytes   | server, 2 | OVER | length of the address |
        from byte 64       the address of the server
        at the end         two locks

    The address counts when its length is written, and is written once.

    Args:
        regions: Of the run on this host.
        create: Whether to make the page if nobody has.

    Attributes:
        serving: Held by the server.
        starting: Held by a worker that starts a server.
    """

    def __init__(self, regions: RunRegions, *, create: bool = True) -> None:
        region = regions.open_region("server", _PAGE_BYTES, create=create)
        self._buffer = region.buffer
        self._words = region.buffer[:_ADDRESS_AT].cast("q")
        self.serving = Mutex(region.buffer[_LOCKS:], "serving")
        self.starting = Mutex(region.buffer[_LOCKS + Mutex.NBYTES :], "starting a server")

    @property
    def server(self) -> ProcessIdentity | None:
        """The process that serves, or served last."""
        pid, start_ticks = self._words[_SERVER : _SERVER + 2]
        return ProcessIdentity(pid, start_ticks) if pid else None

    @property
    def is_served(self) -> bool:
        """Whether there is a server that lives."""
        server = self.server
        return server is not None and server.alive()

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to serve any more."""
        return bool(self._words[_OVER])

    @property
    def address(self) -> str | None:
        """Where the server listens; None before the first one does."""
        length = self._words[_ADDRESS]
        return bytes(self._buffer[_ADDRESS_AT : _ADDRESS_AT + length]).decode() if length else None

    def begin(self, address: str) -> None:
        """Say that this process serves; it holds :attr:`serving`."""
        encoded, me = address.encode(), ProcessIdentity.current()
        self._buffer[_ADDRESS_AT : _ADDRESS_AT + len(encoded)] = encoded
        self._words[_ADDRESS] = len(encoded)
        # Who reads between the two finds no process that lives, and looks again.
        self._words[_SERVER + 1] = me.start_ticks
        self._words[_SERVER] = me.pid

    def end(self) -> None:
        """Say that nobody needs to serve any more."""
        self._words[_OVER] = 1


# --- in a worker ----------------------------------------------------------------------------------


class ServerWatch:
    """Sees, as long as this process is a worker of the run, that its host has a server.

    Args:
        page: Of this host's server.
        spec: What the server has to know.
    """

    def __init__(self, page: ServerPage, spec: ServerSpec) -> None:
        self._page = page
        self._spec = spec
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx server", daemon=True)
        self._thread.start()

    def wait_for_server(self, timeout_s: float) -> str:
        """Wait until this host's server listens; return its address.

        Raises:
            PeerTimeout: It does not.
        """
        if not wait_until(lambda: self._page.is_served, timeout_s):
            raise PeerTimeout(
                f"This host's server did not begin to listen within {timeout_s:g} s. Its own "
                "output says why."
            )
        return str(self._page.address)

    def _run(self) -> None:
        rest_s = 0.0
        while not (self._ended.wait(rest_s) or self._page.is_over):
            rest_s = _LOOK_S
            try:
                if not self._page.is_served:
                    with self._page.starting.held(_BEGIN_S + _LOCK_S):
                        self._start()
            except (PhalanxError, OSError) as exc:  # the system starts no process, say
                _log.error("Host %d has no server yet: %s", self._spec.host, exc)
                rest_s = _AGAIN_S

    def _start(self) -> None:
        """Fork a server, unless another process has. This thread has never run OpenMP."""
        page = self._page
        if page.is_over or page.is_served:
            return
        before = page.server
        fork_apart(lambda: serve(self._spec))  # it outlives this process
        # A server that has begun may be gone again by the time that this thread looks.
        wait_until(lambda: page.is_over or page.server != before or self._ended.is_set(), _BEGIN_S)

    def close(self, timeout_s: float) -> None:
        """End the watch."""
        self._ended.set()
        self._thread.join(timeout_s)


# --- the process ----------------------------------------------------------------------------------


def serve(spec: ServerSpec) -> None:
    """Serve this host's rows until all workers have left."""
    torch.set_num_threads(1)
    context = RunContext(spec.run, create=True)
    try:
        page = ServerPage(context.regions)
        with page.serving.held(_LOCK_S):
            if not page.is_over:
                _serve(spec, context, page)
    finally:
        context.close(_LOCK_S)


def _serve(spec: ServerSpec, context: RunContext, page: ServerPage) -> None:
    service, address = HostService(context), page.address
    if address is None:
        address = f"[{spec.bind}]:0" if ":" in spec.bind else f"{spec.bind}:0"
    tls = None if spec.secret is None else spec.secret.tls(server=True)
    server = Server(service, address, tag=tag_of(spec.cluster, spec.host), tls=tls)
    try:
        page.begin(server.address)
        server.start()
        _wait_until_all_have_left(service, spec.starter)
        page.end()
    finally:
        server.close()


def _wait_until_all_have_left(service: HostService, starter: ProcessIdentity) -> None:
    idle_since_s = now_s()
    while now_s() - idle_since_s < _most_idle_s(service.membership, starter):
        pause(_LOOK_S)
        service.lose_those_without_connection()
        service.membership.mark_dead(_LOCK_S)
        if service.membership.here():
            idle_since_s = now_s()


def _most_idle_s(membership: Membership, starter: ProcessIdentity) -> float:
    """Return for how long to serve nobody."""
    is_wanted = starter.alive()  # asked first: it may join and die between the two
    if not membership.has_begun():
        return math.inf if is_wanted else 0.0
    if membership.awaited():  # the rest may have died before they came
        return _NOBODY_HERE_S
    return _OVER_S
