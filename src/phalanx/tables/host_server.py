"""The server of one host: a process that serves the rows of this host to the others.

The memory belongs to the host: a server that is killed loses nothing. The next one
(host_supervisor.py) maps the same memory and takes the same address, so nobody has to be told.

A second thread asks the servers of the other hosts whether the workers that have come from there
live. A host that does not answer for 10 s is lost, with its workers.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from phalanx.clock import now_s
from phalanx.cluster import Connection, CurveKeys, Endpoint, PendingCall, Secret, Server
from phalanx.errors import PeerTimeout, PhalanxError
from phalanx.ipc import Mutex, ProcessIdentity, wait_until
from phalanx.tables.host_operations import Operation
from phalanx.tables.host_service import HostService
from phalanx.tables.run_context import RunContext
from phalanx.tables.run_regions import RunRegions

__all__ = [
    "ServerPage",
    "ServerSpec",
    "client_keys",
    "serve",
    "server_keys",
    "wait_for_server",
]

_log = logging.getLogger(__name__)

_HOST_LOST_S = 10.0
_LOOK_EVERY_S = 0.25
_NOBODY_HERE_S = 120.0
_OVER_S = 1.0
_LOCK_S = 10.0
_PAGE_BYTES = 1 << 16
_LOCKS = _PAGE_BYTES - 3 * Mutex.NBYTES
_SERVER, _SUPERVISOR, _OVER, _ADDRESS, _ENDPOINTS = 0, 2, 4, 5, 6  # words
_TEXTS = {_ADDRESS: slice(64, 1024), _ENDPOINTS: slice(1024, _LOCKS)}
_NOBODY = 0xFFFFFFFF  # a server asks in nobody's name


class ServerSpec(NamedTuple):
    """What a server has to know.

    Attributes:
        run: Name of the run on this host.
        host: The host's number.
        cluster: Name of the run, the same on all hosts: keys are derived for it.
        bind: The address of the network interface that it listens at.
        secret_file: The path of the run's secret; None for a network that is trusted.
        starter: The process that wants it, to be a worker: if it dies before, the run has failed.
    """

    run: str
    host: int
    cluster: str
    bind: str
    secret_file: str | None
    starter: ProcessIdentity


def server_keys(secret: Secret | None, cluster: str, host: int) -> CurveKeys | None:
    """Return the keys of a host's server."""
    return None if secret is None else secret.keys(f"server {host} of {cluster}")


def client_keys(secret: Secret | None, cluster: str) -> CurveKeys | None:
    """Return the keys of everybody who asks servers of the run."""
    return None if secret is None else secret.keys(f"clients of {cluster}")


class ServerPage:
    """A page of shared memory: who serves this host, and where.

        words of 8 bytes   | server, 2 | supervisor, 2 | OVER | length of ADDRESS, of ENDPOINTS |
        from byte 64       the address of the server
        from byte 1024     the servers of all hosts, as JSON
        at the end         three locks

    A text counts when its length is written, and is written once: a death in between leaves none.

    Args:
        regions: Of the run on this host.
        create: Whether to make the page if nobody has.

    Attributes:
        serving: Held by the server.
        starting: Held by a worker that starts a supervisor.
    """

    def __init__(self, regions: RunRegions, *, create: bool = True) -> None:
        region = regions.open_region("server", _PAGE_BYTES, create=create)
        self._buffer = region.buffer
        self._words = region.buffer[:64].cast("q")
        self.serving = Mutex(region.buffer[_LOCKS:], "serving")
        self.starting = Mutex(region.buffer[_LOCKS + Mutex.NBYTES :], "starting a server")
        self._writing = Mutex(region.buffer[_LOCKS + 2 * Mutex.NBYTES :], "server page")

    @property
    def server(self) -> ProcessIdentity | None:
        """The process that serves, or served last."""
        return self._identity(_SERVER)

    @property
    def supervisor(self) -> ProcessIdentity | None:
        """The process that starts the server again, or did so last."""
        return self._identity(_SUPERVISOR)

    def _identity(self, at: int) -> ProcessIdentity | None:
        with self._writing.held(_LOCK_S):
            pid, start_ticks = self._words[at : at + 2]
        return ProcessIdentity(pid, start_ticks) if pid else None

    @property
    def is_supervised(self) -> bool:
        """Whether there is a supervisor that lives."""
        supervisor = self.supervisor
        return supervisor is not None and supervisor.alive()

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to serve any more."""
        return bool(self._words[_OVER])

    @property
    def address(self) -> str | None:
        """Where the server listens; None before the first one does."""
        return self._text(_ADDRESS)

    @property
    def endpoints(self) -> list[tuple[int, str, str]]:
        """Number, name and address of each host's server; none before they are known."""
        text = self._text(_ENDPOINTS)
        return [] if text is None else [(*each,) for each in json.loads(text)]

    def _text(self, which: int) -> str | None:
        length = self._words[which]
        return bytes(self._buffer[_TEXTS[which]][:length]).decode() if length else None

    def tell_endpoints(self, endpoints: Sequence[tuple[int, str, str]]) -> None:
        """Write the servers of all hosts down, if nobody has."""
        self._write_once(_ENDPOINTS, json.dumps(endpoints))

    def _write_once(self, which: int, text: str) -> None:
        encoded = text.encode()
        with self._writing.held(_LOCK_S):
            if not self._words[which]:
                self._buffer[_TEXTS[which]][: len(encoded)] = encoded
                self._words[which] = len(encoded)

    def begin(self, address: str) -> None:
        """Say that this process serves."""
        self._write_once(_ADDRESS, address)
        with self._writing.held(_LOCK_S):
            self._words[_SERVER : _SERVER + 2] = _as_words(ProcessIdentity.current())

    def supervise(self) -> bool:
        """Say that this process is the supervisor; return False where another one is."""
        with self._writing.held(_LOCK_S):
            pid, start_ticks = self._words[_SUPERVISOR : _SUPERVISOR + 2]
            if pid and ProcessIdentity(pid, start_ticks).alive():
                return False
            self._words[_SUPERVISOR : _SUPERVISOR + 2] = _as_words(ProcessIdentity.current())
        return True

    def end(self) -> None:
        """Say that nobody needs to serve any more."""
        self._words[_OVER] = 1


def _as_words(process: ProcessIdentity) -> memoryview:
    return memoryview(array("q", process))


def serve(spec: ServerSpec, secret: Secret | None) -> None:
    """Serve this host's rows until all workers have left."""
    context = RunContext(spec.run, create=True)
    try:
        page = ServerPage(context.regions, create=False)
        with page.serving.held(_LOCK_S):
            _serve(spec, context, page, secret)
    finally:
        context.close(_LOCK_S)


def _serve(spec: ServerSpec, context: RunContext, page: ServerPage, secret: Secret | None) -> None:
    service = HostService(context)
    clients = client_keys(secret, spec.cluster)
    server = Server(
        service,
        page.address or f"tcp://{spec.bind}:*",
        keys=server_keys(secret, spec.cluster, spec.host),
        client_public=None if clients is None else clients.public,
    )
    ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(spec, page, service, secret, ended), name="phalanx watch", daemon=True
    )
    try:
        page.begin(server.address)
        watch.start()
        server.serve(_until_all_have_left(service, spec.starter))
        page.end()
    finally:
        ended.set()
        server.close()
        watch.join(2.0)


def _until_all_have_left(service: HostService, starter: ProcessIdentity) -> Callable[[], bool]:
    """Return what tells whether to go on: workers are here, or may still come."""
    here_s, ended_s = now_s(), math.inf

    def go_on() -> bool:
        nonlocal here_s, ended_s
        now = now_s()
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


# --- the other hosts ------------------------------------------------------------------------------


@dataclass
class _Asked:
    """What another host was asked: which of its workers live.

    Attributes:
        connection: To its server.
        pending: The question.
        known: Its workers that were here before: who came meanwhile is not judged.
        since_s: When.
    """

    connection: Connection
    pending: PendingCall
    known: list[tuple[int, int, int]]
    since_s: float


def _watch(
    spec: ServerSpec,
    page: ServerPage,
    service: HostService,
    secret: Secret | None,
    ended: threading.Event,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = client_keys(secret, spec.cluster)
    asked: dict[int, _Asked] = {}
    while not ended.wait(_LOOK_EVERY_S):
        for host, name, address in page.endpoints:
            if host == spec.host:
                continue
            try:
                if host not in asked:
                    public = server_keys(secret, spec.cluster, host)
                    endpoint = Endpoint(host, name, address, public and public.public)
                    asked[host] = _ask(Connection(context, endpoint, keys, _NOBODY), service)
                elif asked[host].connection.poll(asked[host].pending, 0.0):
                    _compare(asked[host], service)
                    asked[host] = _ask(asked[host].connection, service)
                elif now_s() > asked[host].since_s + _HOST_LOST_S:
                    service.lose_silent(host, now_s() - _HOST_LOST_S)
            except PhalanxError as exc:
                _log.warning("Server of host %d: %s", spec.host, exc)
                asked.pop(host).connection.close()
    for each in asked.values():
        each.connection.close()
    context.destroy(linger=0)


def _ask(connection: Connection, service: HostService) -> _Asked:
    """Ask a host which of its workers live. A slow link may take its time, so nobody waits."""
    known = service.elsewhere(connection.endpoint.host)
    return _Asked(connection, connection.begin(Operation.MEMBERS, "who lives"), known, now_s())


def _compare(asked: _Asked, service: HostService) -> None:
    """Mark those dead here that do not live there."""
    reply = asked.connection.wait(asked.pending, 0.0)
    alive = {int(worker): incarnation for worker, incarnation in json.loads(reply.text).items()}
    for worker, incarnation, home in asked.known:
        if home and alive.get(worker) != home:
            service.mark_lost(worker, incarnation)


def wait_for_server(page: ServerPage, timeout_s: float) -> str:
    """Wait until this host's server listens; return its address.

    Raises:
        PeerTimeout: It does not.
    """

    def ready() -> bool:
        server = page.server
        return server is not None and server.alive()

    if not wait_until(ready, timeout_s):
        raise PeerTimeout(
            f"This host's server did not begin to listen within {timeout_s:g} s. Its own output "
            "says why."
        )
    return str(page.address)
