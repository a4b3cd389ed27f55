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
import threading
from collections.abc import Callable

import torch

from phalanx.clock import now_s, pause
from phalanx.cluster import Secret, Server
from phalanx.errors import PeerTimeout, PhalanxError
from phalanx.ipc import Mutex, ProcessIdentity, fork_apart, wait_until
from phalanx.tables.host_service import HostService
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


class ServerPage:
    """A page of shared memory: who serves this host, and where.

        words of 8 bytes   | server, 2 | OVER | length of the address |
        from byte 64       the address of the server
        at the end         two locks: of the server, and of a worker that starts one

    The address counts when its length is written, and is written once.
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
        """True where there is a server that lives."""
        server = self.server
        return server is not None and server.alive()

    @property
    def is_over(self) -> bool:
        """True where no server is needed any more."""
        return bool(self._words[_OVER])

    @property
    def address(self) -> str | None:
        """The address of the server; None before the first one does."""
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
        """Say that no server is needed any more."""
        self._words[_OVER] = 1


# --- in a worker ----------------------------------------------------------------------------------


class ServerWatch:
    """Sees, as long as this process is a worker of the run, that its host has a server.

    Args:
        page: Of this host's server.
        serve: What the server's process does.
    """

    def __init__(self, page: ServerPage, serve: Callable[[], None]) -> None:
        self._page = page
        self._serve = serve
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
        page, rest_s = self._page, 0.0
        while not (self._ended.wait(rest_s) or page.is_over):
            rest_s = _LOOK_S
            try:
                if not page.is_served:
                    with page.starting.held(_BEGIN_S + _LOCK_S):
                        self._start(page.server)
            except (PhalanxError, OSError) as exc:  # the system starts no process, say
                _log.error("This host has no server yet: %s", exc)
                rest_s = _AGAIN_S

    def _start(self, before: ProcessIdentity | None) -> None:
        """Fork a server, unless another process has. This thread has never run OpenMP."""
        page, ended = self._page, self._ended
        if page.is_over or page.is_served:
            return
        fork_apart(self._serve)  # it outlives this process
        # One that has begun may be gone again by the time that this thread looks.
        wait_until(lambda: page.is_over or page.server != before or ended.is_set(), _BEGIN_S)

    def close(self, timeout_s: float) -> None:
        """End the watch."""
        self._ended.set()
        self._thread.join(timeout_s)


# --- the process ----------------------------------------------------------------------------------


def serve(run: str, bind: str, secret: Secret | None, starter: ProcessIdentity) -> None:
    """Serve this host's rows until all workers have left.

    Args:
        run: Name of the run on this host.
        bind: The address of the network interface to listen at.
        secret: The run's; None for a network that is trusted.
        starter: The process that wants it, to be a worker: if it dies before, the run has failed.
    """
    torch.set_num_threads(1)
    context = RunContext(run)
    try:
        page = ServerPage(context.regions)
        with page.serving.held(_LOCK_S):
            if not page.is_over:
                service = HostService(context)
                address = page.address or (f"[{bind}]:0" if ":" in bind else f"{bind}:0")
                with Server(service, address, run, secret) as server:
                    page.begin(server.address)
                    _wait_until_all_have_left(service, starter)
                    page.end()
    finally:
        context.close(_LOCK_S)


def _wait_until_all_have_left(service: HostService, starter: ProcessIdentity) -> None:
    membership, idle_since_s, most_idle_s = service.membership, now_s(), _OVER_S
    while now_s() < idle_since_s + most_idle_s:
        pause(_LOOK_S)
        service.lose_those_without_connection()
        membership.mark_dead(_LOCK_S)
        is_wanted = starter.alive()  # asked first: it may join and die between the two
        if membership.here() or (is_wanted and not membership.has_begun()):
            idle_since_s = now_s()
        # Those who were announced may still come, or have died before they came.
        is_late = membership.has_begun() and membership.awaited()
        most_idle_s = _NOBODY_HERE_S if is_late else _OVER_S
