"""How the processes of a run on several hosts find each other, over the store of their job.

    <run>/place/<rank>     what is equal for processes that can share memory, the host's name, and
                           whether the process has a secret
    <run>/server/<host>    the address of its server, by the first process there

Processes that join again, when their first run is over, begin one of another name. The store is
open to whoever reaches its port. No key travels through it, and both ends of a connection know each
other by their certificate: a lie in the store ends the start, and gives nothing away.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections import Counter
from typing import Any

from phalanx.cluster import Endpoint, Secret
from phalanx.distributed import hosts_of, open_store, this_host
from phalanx.environment import Place
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.ipc import ProcessIdentity, Waiting
from phalanx.tables.host_server import ServerPage, ServerSpec, ServerWatch
from phalanx.tables.membership import BARRIERS, TICKS
from phalanx.tables.remote_part import RemoteHost
from phalanx.tables.run_context import RunContext

_START_S = 60.0  # of a server on a busy machine
_CLOSE_S = 5.0
_met: Counter[str] = Counter()  # how often this process has met others, by the name it was given


def join_hosts(
    place: Place, secret_file: str | None, trusted_network: bool | None, timeout_s: float
) -> RunContext:
    """Begin this host's share of a run, see that it has a server, and find the other hosts'.

    Args:
        place: This process's in the job.
        secret_file: The file of what connections are encrypted with, if there is one.
        trusted_network: Whether servers may do without. Where both are None, variables say.
        timeout_s: How long to wait for the others.

    Raises:
        ConfigError: Servers would speak to anybody, or some processes have no secret.
        PeerTimeout: A process does not say where it is, or a host has no server in time.
    """
    rank, run, master = place.rank, place.job, place.find_store()
    secret, trusted_network = _read_trust(secret_file, trusted_network)
    bind = address_to_serve_at(master[0], secret, trusted_network=trusted_network)
    name = f"{run}-{_met[run]}" if _met[run] else run
    store = _RunStore(open_store(*master, rank, place.size, timeout_s), name)
    places = _places(store, rank, place.size, has_secret=secret is not None)
    hosts = hosts_of([there for there, *_ in places])
    host = hosts.host_of(rank)
    # The host's number is part of the name, since one machine may simulate several.
    context = RunContext(f"{name}-{host}", create=True)
    page, waiting = ServerPage(context.regions), Waiting(timeout_s + _START_S)
    me = ProcessIdentity.current()
    watch = ServerWatch(page, ServerSpec(f"{name}-{host}", host, name, bind, secret, me))
    try:
        address = watch.wait_for_server(waiting.remaining_s())
        if rank == hosts.leaders[host]:
            store.put(f"server/{host}", address)
        tls = None if secret is None else secret.tls(server=False)
        endpoints = []
        for number, leader in enumerate(hosts.leaders):
            title = f"Host {number} ({places[leader][1]})"
            way_out = (
                f"{title} has not said where its server is. Rank {leader}, the first process "
                "there, starts it: see its output, and start all hosts again."
            )
            there = str(store.take(f"server/{number}", way_out))
            endpoints.append(Endpoint(number, title, there, name, tls))
    except BaseException:
        watch.close(_CLOSE_S)
        context.close(_CLOSE_S)
        raise
    _met[run] += 1
    others = [each for each in endpoints if each.host != host]

    def connect(worker: int) -> list[RemoteHost]:
        def clocks() -> tuple[int, int]:
            clock = context.membership.clock
            return clock(worker, TICKS), clock(worker, BARRIERS)

        return [RemoteHost(each, worker, clocks) for each in others]

    context.host, context.num_hosts = host, len(endpoints)
    context.connect, context.end = connect, watch.close
    context.store = store  # this process may be the one that serves it
    return context


class _RunStore:
    """The job's store, as far as it is this run's."""

    def __init__(self, store: Any, name: str) -> None:  # Any: of torch, or of ours
        self._store = store
        self._name = name

    def put(self, key: str, value: object) -> None:
        self._store.set(f"phalanx/tables/{self._name}/{key}", json.dumps(value))

    def take(self, key: str, way_out: str) -> Any:  # Any: JSON
        try:
            return json.loads(self._store.get(f"phalanx/tables/{self._name}/{key}"))
        except RuntimeError as exc:
            raise PeerTimeout(f"The store of the job has no {key!r}: {exc}. {way_out}") from exc


def _places(store: _RunStore, rank: int, size: int, *, has_secret: bool) -> list[tuple[str, str]]:
    """Say where this process is; return what equals among processes of a host, and its name.

    Raises:
        ConfigError: Some processes have a secret, and others have none.
        PeerTimeout: One does not say where it is.
    """
    store.put(f"place/{rank}", [this_host(), socket.gethostname(), has_secret])
    places = []
    for other in range(size):
        way_out = f"See that rank {other} runs and calls `tables.join`."
        host, name, other_has_secret = store.take(f"place/{other}", way_out)
        if other_has_secret != has_secret:
            have, has = ("none", "one") if has_secret else ("one", "none")
            raise ConfigError(
                f"All processes of a run must have its secret, or none, but rank {other} has "
                f"{have} and this one has {has}. Bring the secret file to all hosts, and name it "
                "there by PHALANX_SECRET_FILE or `secret_file`."
            )
        places.append((str(host), str(name)))
    return places


def _read_trust(
    secret_file: str | None, trusted_network: bool | None
) -> tuple[Secret | None, bool]:
    """Return the secret and whether the network is trusted: as given, or by variables.

    Raises:
        ConfigError: There are both, or the file is none.
    """
    if secret_file is None and trusted_network is None:
        secret_file = os.environ.get("PHALANX_SECRET_FILE") or None
        trusted_network = bool(os.environ.get("PHALANX_TRUSTED_NETWORK"))
    if secret_file and trusted_network:
        raise ConfigError(
            "`trusted_network` must be False where `secret_file` is given, but both are set. With "
            "a secret everything between hosts is encrypted, and no network needs to be trusted."
        )
    return (Secret.read(secret_file) if secret_file else None), bool(trusted_network)


def address_to_serve_at(master: str, secret: Secret | None, *, trusted_network: bool) -> str:
    """Return the address at which this host's server listens: where the store is reached from.

    Raises:
        ConfigError: Nobody may speak to servers.
    """
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing: it asks the kernel for the route
        address = str(probe.getsockname()[0])
    if secret is None and not trusted_network and not ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            "`secret_file` must be given for tables on several hosts, or `trusted_network` be "
            "True, but neither is. Make a secret by `phalanx secret FILE`, bring the file to "
            "every host, and set PHALANX_SECRET_FILE there; without one, whoever "
            f"reaches {address} reads and changes the tables."
        )
    return address
