"""The server of one host: a process that serves the rows of this host to the others.

    worker ──forks──► server ──every worker has left──► ended
      ▲                  │
      └─────is killed────┘

The memory belongs to the host: a server that is killed loses nothing. Each worker process of the
host looks whether the server lives; the first to miss it forks the next one, which maps the same
memory and takes the same address, which its clients know. A fork needs no import of torch, so it
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
from phalanx.ipc import Mutex, ProcessIdentity, Regions, fork_apart, wait_until
from phalanx.tables.host_service import HostService
from phalanx.tables.run_context import RunContext, read_text, write_text

_log = logging.getLogger(__name__)

_NOBODY_HERE_S = 120.0
_OVER_S = 1.0
_LOCK_S = 10.0
_LOOK_S, _AGAIN_S = 0.05, 1.0
_BEGIN_S = 10.0  # a fork that does not listen by then is replaced by another
_PAGE_BYTES = 4096
_LOCKS = _PAGE_BYTES - 2 * Mutex.NBYTES
_OVER = _LOCKS - 8


class ServerPage:
    """A page of shared memory: whether this host has a server, and where.

    at the beginning   the address of the server, once the first one listens
    at the end         OVER, 1 when no server is needed any more | two locks:
                       of the server, as long as it lives; of a worker that looks whether it does
    """

    def __init__(self, regions: Regions, *, create: bool = True) -> None:
        self._region = regions.open_region("server", _PAGE_BYTES, create=create)
        self._over = self._region.buffer[_OVER:_LOCKS].cast("q")
        locks = self._region.buffer[_LOCKS:]
        self.serving = Mutex(locks, "serving")
        self.starting = Mutex(locks[Mutex.NBYTES :], "starting a server")

    @property
    def is_served(self) -> bool:
        """True where a server lives; the lock of a dead one is free."""
        try:
            with self.serving.held(0.0):
                return False
        except PeerTimeout:
            return True

    @property
    def is_over(self) -> bool:
        """True where no server is needed any more."""
        return bool(self._over[0])

    @property
    def address(self) -> str:
        """The address of the server; empty before the first one listens."""
        return read_text(self._region)

    @address.setter
    def address(self, address: str) -> None:
        write_text(self._region, address)

    def end(self) -> None:
        """Say that no server is needed any more."""
        self._over[0] = 1


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
        if not wait_until(lambda: bool(self._page.address), timeout_s):
            raise PeerTimeout(
                f"This host's server did not begin to listen within {timeout_s:g} s. Its own "
                "output says why."
            )
        return self._page.address

    def _run(self) -> None:
        page, rest_s = self._page, 0.0
        while not (self._ended.wait(rest_s) or page.is_over):
            rest_s = _LOOK_S
            try:
                with page.starting.held(_BEGIN_S + _LOCK_S):  # one worker looks at a time
                    if not page.is_served:
                        self._start()
            except (PhalanxError, OSError) as exc:  # the system starts no process, say
                _log.error("This host has no server yet: %s", exc)
                rest_s = _AGAIN_S

    def _start(self) -> None:
        """Fork a server, and wait until it has begun. This thread has never run OpenMP."""
        page, ended = self._page, self._ended
        fork_apart(self._serve)  # it outlives this process, and may be killed before this one looks
        wait_until(lambda: page.serving.owner > 0 or page.is_over or ended.is_set(), _BEGIN_S)

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
        secret: The run's; None on the loopback interface alone.
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
                    page.address = server.address
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
