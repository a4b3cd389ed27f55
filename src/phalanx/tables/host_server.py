"""The server of one host: a process that serves the rows of this host to the others.

    standby ──the server has died──► server ──starts the next──► standby
                                        │ every worker has left
                                        ▼
                                      ended

The memory belongs to the host: server and standby are members of the run's directory, and the
server holds a lock that the kernel frees when it dies. The standby has imported everything and
waits for that; it takes the same address, so nobody has to be told.

A second thread asks the servers of the other hosts whether the workers that have come from there
live. A host that does not answer for 10 s is lost, with its workers.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import zmq

from phalanx.clock import now_s
from phalanx.cluster import Connection, CurveKeys, Endpoint, Secret, Server
from phalanx.errors import ConfigError, PeerTimeout, PhalanxError, StateError
from phalanx.ipc import LockFile, ProcessIdentity, wait_until
from phalanx.tables.host_operations import Operation
from phalanx.tables.host_service import HostService
from phalanx.tables.run_context import RunContext
from phalanx.tables.run_regions import RunRegions

__all__ = [
    "ServerPage",
    "ServerSpec",
    "client_keys",
    "main",
    "server_keys",
    "start_server",
    "wait_for_server",
]

_log = logging.getLogger(__name__)

_HOST_LOST_S = 10.0
_ASK_EVERY_S = 0.5
_NOBODY_CAME_S = 120.0
_OVER_S = 1.0
_PAGE_BYTES = 1 << 16
_PID, _START, _OVER, _LENGTH, _NUM_HOSTS = range(5)
_TEXT = 64
_NOBODY = 0xFFFFFFFF  # a server asks in nobody's name


class ServerSpec(NamedTuple):
    """What a server has to know.

    Attributes:
        run: Name of the run on this host.
        host: The host's number.
        cluster: Name of the run, the same on all hosts: keys are derived for it.
        bind: The address of the network interface that it listens at.
        secret_file: The path of the run's secret; None for a network that is trusted.
        is_first: Whether there was no server before: one that comes later finds the run, or ends.
    """

    run: str
    host: int
    cluster: str
    bind: str
    secret_file: str | None
    is_first: bool = True


def server_keys(secret: Secret | None, cluster: str, host: int) -> CurveKeys | None:
    """Return the keys of a host's server."""
    return None if secret is None else secret.keys(f"server {host} of {cluster}")


def client_keys(secret: Secret | None, cluster: str) -> CurveKeys | None:
    """Return the keys of everybody who asks servers of the run."""
    return None if secret is None else secret.keys(f"clients of {cluster}")


class ServerPage:
    """A page of shared memory with the address of this host's server, and those of the others.

        words   | PID | START | OVER | LENGTH | NUM_HOSTS |      then JSON: address, endpoints

    Args:
        regions: Of the run on this host.
        create: Whether to make the page if nobody has.
    """

    def __init__(self, regions: RunRegions, *, create: bool = True) -> None:
        region = regions.open_region("server", _PAGE_BYTES, create=create)
        self._buffer = region.buffer
        self._words = region.buffer[:_TEXT].cast("q")
        file = LockFile(region)
        self.serving = file.range(0, 8, label="serving")
        self._writing = file.range(8, 8, label="server page")

    @property
    def server(self) -> ProcessIdentity | None:
        """The process that serves, or served last."""
        pid = self._words[_PID]
        return ProcessIdentity(pid, self._words[_START]) if pid else None

    @property
    def is_over(self) -> bool:
        """Whether the server has ended because all workers have."""
        return bool(self._words[_OVER])

    def read(self) -> dict[str, object]:
        """Return what is written down: `address`, and `endpoints` when they are known."""
        with self._writing.exclusive(10.0):
            length = self._words[_LENGTH]
            text = bytes(self._buffer[_TEXT : _TEXT + length])
        found: dict[str, object] = json.loads(text) if text else {}
        return found

    def write(self, **values: object) -> None:
        """Write values down beside those that are there."""
        text = json.dumps({**self.read(), **values}).encode()
        with self._writing.exclusive(10.0):
            self._buffer[_TEXT : _TEXT + len(text)] = text
            self._words[_LENGTH] = len(text)

    def begin(self) -> None:
        """Say that this process serves."""
        me = ProcessIdentity.current()
        self._words[_OVER] = 0
        self._words[_START] = me.start_ticks
        self._words[_PID] = me.pid

    def end(self) -> None:
        """Say that nobody needs to serve any more."""
        self._words[_OVER] = 1


def start_server(spec: ServerSpec) -> None:
    """Start a server, or a standby where there is one, that outlives this process."""
    subprocess.Popen(
        [sys.executable, "-m", "phalanx.tables.host_server", json.dumps(spec)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(arguments: str) -> None:
    """Serve, or stand by until the server dies."""
    spec = ServerSpec(*json.loads(arguments))
    secret = None if spec.secret_file is None else Secret.read(spec.secret_file)
    try:
        context = RunContext(spec.run, create=spec.is_first)
    except StateError:
        if spec.is_first:
            raise
        return  # the run was over before this standby had begun
    try:
        page = ServerPage(context.regions, create=spec.is_first)
        if _stand_by(page):
            with page.serving.exclusive(10.0):
                _serve(spec, context, page, secret)
    finally:
        context.close(10.0)


def _stand_by(page: ServerPage) -> bool:
    """Wait until nobody serves; tell whether somebody has to."""
    while not page.is_over:
        server = page.server
        if server is None or not server.alive():
            return True
        with suppress(ProcessLookupError):
            process = os.pidfd_open(server.pid)
            try:
                if server.alive():  # so the descriptor is its, and no later process's
                    select.select([process], [], [], 10.0)
            finally:
                os.close(process)
    return False


def _serve(spec: ServerSpec, context: RunContext, page: ServerPage, secret: Secret | None) -> None:
    if page.is_over:
        return
    service = HostService(context)
    known = page.read().get("address")
    clients = client_keys(secret, spec.cluster)
    server = Server(
        service,
        str(known) if known else f"tcp://{spec.bind}:*",
        keys=server_keys(secret, spec.cluster, spec.host),
        client_public=None if clients is None else clients.public,
    )
    ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(spec, page, service, secret, ended), name="phalanx watch", daemon=True
    )
    try:
        page.write(address=server.address)
        page.begin()
        start_server(spec._replace(is_first=False))  # the next one
        watch.start()
        server.serve(_until_all_have_left(service))
        page.end()
    finally:
        ended.set()
        server.close()
        watch.join(2.0)


def _until_all_have_left(service: HostService) -> Callable[[], bool]:
    """Return what tells whether to go on: workers are here, or may still come."""
    came, since_s = False, now_s()

    def go_on() -> bool:
        nonlocal came, since_s
        now = now_s()
        if not service.is_over():
            came, since_s = True, now
        return now < since_s + (_OVER_S if came else _NOBODY_CAME_S)

    return go_on


# --- the other hosts ------------------------------------------------------------------------------


def _watch(
    spec: ServerSpec,
    page: ServerPage,
    service: HostService,
    secret: Secret | None,
    ended: threading.Event,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = client_keys(secret, spec.cluster)
    connections: dict[int, Connection] = {}
    heard_s: dict[int, float] = {}
    while not ended.wait(_ASK_EVERY_S):
        endpoints = page.read().get("endpoints")
        if not isinstance(endpoints, list):
            continue
        for host, name, address in endpoints:
            if host == spec.host:
                continue
            if host not in connections:
                public = server_keys(secret, spec.cluster, host)
                endpoint = Endpoint(host, name, address, None if public is None else public.public)
                connections[host] = Connection(context, endpoint, keys, _NOBODY)
                heard_s[host] = now_s()
            try:
                _compare(connections[host], service)
                heard_s[host] = now_s()
            except PeerTimeout:
                if now_s() > heard_s[host] + _HOST_LOST_S:
                    for worker, incarnation, _ in service.elsewhere(host):
                        service.mark_lost(worker, incarnation)
            except PhalanxError as exc:
                _log.warning("Server of host %d: %s", spec.host, exc)
    for connection in connections.values():
        connection.close()
    context.destroy(linger=0)


def _compare(connection: Connection, service: HostService) -> None:
    """Ask a host which of its workers live; mark those dead here that do not."""
    known = service.elsewhere(connection.endpoint.host)
    reply = connection.call(Operation.MEMBERS, "who lives", 1.0)
    alive = {int(worker): incarnation for worker, incarnation in json.loads(reply.text).items()}
    for worker, incarnation, home in known:  # of before: who came meanwhile is not judged
        if home and alive.get(worker) != home:
            service.mark_lost(worker, incarnation)


def wait_for_server(page: ServerPage, timeout_s: float) -> str:
    """Wait until this host's server listens; return its address.

    Raises:
        PeerTimeout: It does not.
    """

    def ready() -> bool:
        server = page.server
        return server is not None and server.alive() and "address" in page.read()

    if not wait_until(ready, timeout_s):
        raise PeerTimeout(
            f"This host's server did not begin to listen within {timeout_s:g} s. Its own output "
            "says why."
        )
    return str(page.read()["address"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise ConfigError("A server must be started by `tables.join`.")
    main(sys.argv[1])
