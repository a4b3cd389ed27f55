"""The meeting of the processes of a run on several hosts, over the store of their job.

Each says in one entry which others it can share memory with, the name of its host, and where its
host's server is. Processes that join again, when their first run is over,
begin one of another name.

The store is open to everybody who reaches its port. No key travels through it, and both ends of a
connection know each other by their certificate: a lie in the store ends the start, and gives
nothing away.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from phalanx.cluster import Endpoint, Secret
from phalanx.distributed import open_store, ranks_by_host, this_host
from phalanx.environment import Place
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.ipc import ProcessIdentity
from phalanx.tables.host_server import ServerPage, ServerWatch, serve
from phalanx.tables.remote_host import RemoteHost
from phalanx.tables.run_context import RunContext

_START_S = 60.0  # of a server on a busy machine
_CLOSE_S = 5.0
_met: Counter[str] = Counter()  # how often this process has met others, by the name it was given


def join_hosts(place: Place, secret_file: str | None, timeout_s: float) -> RunContext:
    """Begin this host's share of a run, see that it has a server, and find the other hosts'.

    Raises:
        ConfigError: Servers would speak to anybody, or the secret's file is none.
        PeerTimeout: This host has no server in time, or a process does not say where its is.
    """
    job = place.job
    secret_file = secret_file or os.environ.get("PHALANX_SECRET_FILE")
    secret = Secret.read(secret_file) if secret_file else None
    bind = address_to_serve_at(place.find_store()[0], secret)
    name = f"{job}-{_met[job]}" if _met[job] else job
    store = open_store(place, timeout_s)
    run = run_on(this_host(), name)
    context = RunContext(run)
    page, me = ServerPage(context.regions), ProcessIdentity.current()
    watch = ServerWatch(page, partial(serve, run, bind, secret, me))
    try:
        address = watch.wait_for_server(timeout_s + _START_S)
        here = _Here(this_host(), socket.gethostname(), address)
        places = _exchange(store, name, place, here)
    except BaseException:
        watch.close(_CLOSE_S)
        context.close(_CLOSE_S)
        raise
    _met[job] += 1
    hosts = ranks_by_host([each.host for each in places])
    tls = None if secret is None else secret.tls(server=False)
    endpoints = [
        Endpoint(
            number, f"Host {number} ({there.name})", there.address, run_on(there.host, name), tls
        )
        for number, there in enumerate(places[ranks[0]] for ranks in hosts)
    ]
    context.num_hosts = len(endpoints)
    context.host = next(host for host, ranks in enumerate(hosts) if place.rank in ranks)
    others = [each for each in endpoints if each.host != context.host]
    membership = context.membership
    context.connect = lambda worker: [RemoteHost(each, worker, membership) for each in others]
    context.end = watch.close
    context.store = store  # this process may be the one that serves it
    return context


def run_on(host: str, name: str) -> str:
    """Return what a run is called on a host, since one machine may simulate several."""
    return f"{name}-{hashlib.sha256(host.encode()).hexdigest()[:8]}"


class _Here(NamedTuple):
    host: str  # equal for processes that can share memory
    name: str
    address: str  # of the host's server


def _exchange(store: Any, name: str, place: Place, here: _Here) -> list[_Here]:  # Any: torch's
    """Say where this process is; return where each of the run is, by rank.

    Raises:
        PeerTimeout: One does not say where it is.
    """
    store.set(f"phalanx/tables/{name}/{place.rank}", json.dumps(here))
    places = []
    for rank in range(place.size):
        try:
            there = _Here(*json.loads(store.get(f"phalanx/tables/{name}/{rank}")))
        except RuntimeError as exc:
            raise PeerTimeout(
                f"Rank {rank} has not said in the store of the job where its host's server is: "
                f"{exc}. See that it runs and calls `tables.join`.",
                rank,
            ) from exc
        places.append(there)
    return places


def address_to_serve_at(master: str, secret: Secret | None) -> str:
    """Return the address at which this host's server listens: where the store is reached from.

    Raises:
        ConfigError: That is a network, and there is no secret.
    """
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing: it asks the kernel for the route
        address = str(probe.getsockname()[0])
    if secret is None and not ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            "`secret_file` must be given for tables on several hosts, but is None. Make a secret "
            "by `phalanx secret FILE`, bring the file to every host, and set PHALANX_SECRET_FILE "
            f"there; without one, any program that reaches {address} could change the tables."
        )
    return address
