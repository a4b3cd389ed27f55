"""The process that starts a host's server, and starts it again when it is killed.

    worker ──starts──► supervisor ──forks──► server ──every worker has left──► ended
       ▲                │    ▲                  │
       └────is killed───┘    └─────is killed────┘

The supervisor has imported everything, and has neither threads nor sockets: a server that it forks
listens after some milliseconds, where starting Python with torch takes two seconds. It ends with
the server. Each worker process of the host waits for the supervisor's death; the first to notice
starts another, which waits for the server that is still there, or forks one.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import select
import subprocess
import sys
import threading

from phalanx.cluster import Secret
from phalanx.errors import ConfigError, PeerTimeout, PhalanxError, StateError
from phalanx.ipc import ProcessIdentity, wait_until
from phalanx.tables.host_server import ServerPage, ServerSpec, serve
from phalanx.tables.run_regions import RunRegions

__all__ = ["SupervisorWatch", "ensure_supervisor", "main", "start_supervisor", "supervise"]

_log = logging.getLogger(__name__)

_START_S = 60.0  # a process that imports torch on a busy machine
_FORK = multiprocessing.get_context("fork")


# --- in a worker ----------------------------------------------------------------------------------


def start_supervisor(spec: ServerSpec) -> None:
    """Start a process that outlives this one."""
    subprocess.Popen(
        [sys.executable, "-m", "phalanx.tables.host_supervisor", json.dumps(spec)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def ensure_supervisor(page: ServerPage, spec: ServerSpec, timeout_s: float = _START_S) -> None:
    """See that this host has a supervisor, or needs none any more; one process starts it.

    Raises:
        PeerTimeout: It did not start in time.
    """
    with page.starting.held(timeout_s):
        if page.is_over or page.is_supervised:
            return
        start_supervisor(spec)
        if not wait_until(lambda: page.is_over or page.is_supervised, timeout_s):
            raise PeerTimeout(
                f"The supervisor of this host's server did not start within {timeout_s:g} s. Its "
                "own output says why."
            )


class SupervisorWatch:
    """Sees, as long as this process is a worker of the run, that the host has a supervisor.

    Args:
        page: Of this host's server.
        spec: What the server has to know.
    """

    def __init__(self, page: ServerPage, spec: ServerSpec) -> None:
        self._page = page
        self._spec = spec
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="phalanx supervisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._page.is_over:
            if self._wait_for_a_death():
                return
            try:
                ensure_supervisor(self._page, self._spec)
            except PhalanxError as exc:  # calls to this host end by their own deadlines
                _log.error("Host %d has no server any more: %s", self._spec.host, exc)
                return

    def _wait_for_a_death(self) -> bool:
        """Wait until the supervisor is gone; return True if the watch is to end before."""
        supervisor = self._page.supervisor
        descriptor = None if supervisor is None else supervisor.open_descriptor()
        if descriptor is None:
            return False
        try:
            return self._ended in _wait_for_any(descriptor, self._ended)
        finally:
            os.close(descriptor)

    def close(self, timeout_s: float) -> None:
        """End the watch."""
        os.eventfd_write(self._ended, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._ended)


# --- the process ----------------------------------------------------------------------------------


def main(arguments: str) -> None:
    """Be the supervisor, if this host needs one."""
    spec = ServerSpec(*json.loads(arguments))
    supervise(spec._replace(starter=ProcessIdentity(*spec.starter)))


def supervise(spec: ServerSpec) -> None:
    """Start the server, again and again, until it ends by itself."""
    secret = None if spec.secret_file is None else Secret.read(spec.secret_file)
    regions = RunRegions(spec.run)
    try:
        page = ServerPage(regions, create=False)
        if page.supervise():
            _supervise(spec, page, secret)
    except StateError:
        pass  # the run was over before this process had begun
    finally:
        regions.close()


def _supervise(spec: ServerSpec, page: ServerPage, secret: Secret | None) -> None:
    while not page.is_over:
        _wait_for_end(page.server)
        if page.is_over:
            return
        if run_server(spec, secret):
            page.end()  # where it has raised, the next one would, too


def _wait_for_end(server: ProcessIdentity | None) -> None:
    """Wait for a server that another supervisor has started."""
    descriptor = None if server is None else server.open_descriptor()
    if descriptor is not None:
        _wait_for_any(descriptor)
        os.close(descriptor)


def _wait_for_any(*descriptors: int) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]


def run_server(spec: ServerSpec, secret: Secret | None) -> bool:
    """Run a server in a process of its own; return whether it has ended by itself."""
    process = _FORK.Process(target=serve, args=(spec, secret), name="phalanx server")
    process.start()
    process.join()
    return process.exitcode is not None and process.exitcode >= 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise ConfigError("A supervisor must be started by `tables.join`.")
    main(sys.argv[1])
