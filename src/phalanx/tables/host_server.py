"""The server of one host: a process that serves the rows of this host to the others.

    worker ──forks──► server ──every worker has left──► ended
      ▲                  │
      └─────is killed────┘

The memory belongs to the host: a server that is killed loses nothing. Each worker process of the
host waits for the server's death; the first to notice forks the next one, which maps the same
memory and takes the same address, so nobody has to be told. A fork needs no import of torch, so it
listens after some milliseconds. It keeps the memory that its parent had at that moment, as far as
the parent writes there later.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch

from phalanx.clock import now_s
from phalanx.cluster import Secret, Server, tag_of
from phalanx.errors import PeerTimeout, PhalanxError
from phalanx.ipc import Mutex, ProcessIdentity, fork_apart, wait_until
from phalanx.tables.host_service import HostService
from phalanx.tables.run_context import RunContext
from phalanx.tables.run_regions import RunRegions

__all__ = ["ServerPage", "ServerSpec", "ServerWatch", "serve"]

_log = logging.getLogger(__name__)

_NOBODY_HERE_S = 120.0
_OVER_S = 1.0
_LOCK_S = 10.0
_AGAIN_MS = 1000.0
_BEGIN_S = 10.0  # a fork that does not listen by then is replaced by another
_PAGE_BYTES = 4096
_LOCKS = _PAGE_BYTES - 3 * Mutex.NBYTES
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
        at the end         three locks

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
        self._writing = Mutex(region.buffer[_LOCKS + 2 * Mutex.NBYTES :], "server page")

    @property
    def server(self) -> ProcessIdentity | None:
        """The process that serves, or served last."""
        with self._writing.held(_LOCK_S):
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
        """Say that this process serves."""
        encoded = address.encode()
        with self._writing.held(_LOCK_S):
            self._buffer[_ADDRESS_AT : _ADDRESS_AT + len(encoded)] = encoded
            self._words[_ADDRESS] = len(encoded)
            self._words[_SERVER : _SERVER + 2] = memoryview(array("q", ProcessIdentity.current()))

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
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
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
        while not self._page.is_over:
            try:
                if self._wait_for_its_death():
                    return
                with self._page.starting.held(_BEGIN_S + _LOCK_S):
                    self._start()
            except (PhalanxError, OSError) as exc:  # the system starts no process, say
                _log.error("Host %d has no server yet: %s", self._spec.host, exc)
                if _readable(_AGAIN_MS, self._ended):
                    return

    def _start(self) -> None:
        """Fork a server, unless another process has. This thread has never run OpenMP."""
        page = self._page
        if page.is_over or page.is_served:
            return
        start_server(self._spec)
        wait_until(lambda: page.is_over or page.is_served or self._is_ended(), _BEGIN_S)

    def _is_ended(self) -> bool:
        return bool(_readable(0.0, self._ended))

    def _wait_for_its_death(self) -> bool:
        """Wait until the server is gone; return True if the watch is to end before."""
        server = self._page.server
        descriptor = None if server is None else server.open_descriptor()
        if descriptor is None:
            return self._is_ended()
        try:
            return self._ended in _readable(None, descriptor, self._ended)
        finally:
            os.close(descriptor)

    def close(self, timeout_s: float) -> None:
        """End the watch."""
        os.eventfd_write(self._ended, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._ended)


def _readable(timeout_ms: float | None, *descriptors: int) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout_ms)]


def start_server(spec: ServerSpec) -> None:
    """Fork a server, which outlives this process."""
    fork_apart(lambda: _be_server(spec))


# --- the process ----------------------------------------------------------------------------------


def _be_server(spec: ServerSpec) -> None:
    torch.set_num_threads(1)
    serve(spec)


def serve(spec: ServerSpec) -> None:
    """Serve this host's rows until all workers have left."""
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
        server.serve(_until_all_have_left(service, spec.starter))
        page.end()
    finally:
        server.close()


def _until_all_have_left(service: HostService, starter: ProcessIdentity) -> Callable[[], bool]:
    """Return what tells whether to go on: workers are here, or may still come."""
    here_s, ended_s = now_s(), math.inf

    def go_on() -> bool:
        nonlocal here_s, ended_s
        now = now_s()
        service.lose_those_without_session()
        if service.is_over():  # who came may have left before anybody looked
            ended_s = min(ended_s, now)
            return now < ended_s + _OVER_S
        ended_s = math.inf
        is_wanted = starter.alive()  # asked first: it may join and die between the two
        if not service.has_begun():
            return is_wanted
        if service.is_anybody_here():
            here_s = now
        return now < here_s + _NOBODY_HERE_S  # the rest may have died before they came

    return go_on
