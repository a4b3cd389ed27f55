"""How the processes of a run on several hosts find each other, over the store of their job.

    place/<rank>     what is equal for processes that can share memory,     every process says it
                     the host's name, and a number that it has drawn
    run              the name of the run, and all those numbers             rank 0
    server/<host>    name of the host, address of its server                the first process there

The store is open to whoever reaches its port; no key travels through it. Values are signed with the
secret for their key, so others are refused. One of an earlier start of the run is, too: a process
finds the number that it has drawn in `run`, and later values are signed for the first of them.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
from typing import NamedTuple, Protocol

from phalanx.cluster import Endpoint, Secret
from phalanx.distributed import hosts_of, this_host
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.ipc import ProcessIdentity, Waiting
from phalanx.tables.host_server import ServerPage, ServerSpec, ServerWatch
from phalanx.tables.run_on_hosts import OtherHosts
from phalanx.tables.run_regions import RunRegions

__all__ = ["JobStore", "Place", "Trust", "find_place", "meet_hosts", "read_trust"]

_BETWEEN = "\n"
_START_S = 60.0  # of a server on a busy machine
_CLOSE_S = 5.0


class JobStore(Protocol):
    """What is used of a store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class Trust(NamedTuple):
    """Who may speak to servers.

    Attributes:
        secret: Holders of it; None for everybody who reaches them.
        network: Whether the user has said that the network may be trusted.
    """

    secret: Secret | None
    network: bool


class Place(NamedTuple):
    """Where a process of the run is.

    Attributes:
        cluster: The run, by the same name on all hosts.
        run: Its name on this host: one machine may play several.
        host: This host's number.
        leaders: The first rank of each host, which tells the others of its server.
        names: What each host calls itself.
        start: Drawn for this start of the run.
        rank: This process's.
    """

    cluster: str
    run: str
    host: int
    leaders: tuple[int, ...]
    names: tuple[str, ...]
    start: str
    rank: int


def read_trust(secret_file: str | None, trusted_network: bool) -> Trust:
    """Return the trust that a run puts in its network.

    Raises:
        ConfigError: Both a secret and a trusted network are given, or the secret cannot be used.
    """
    if secret_file and trusted_network:
        raise ConfigError(
            "`trusted_network` must be False where `secret_file` is given, but both are set. With "
            "a secret everything between hosts is encrypted, and no network needs to be trusted."
        )
    if not secret_file:
        return Trust(None, trusted_network)
    return Trust(Secret.read(secret_file), trusted_network)


class _SignedStore:
    """The store, with values that are signed for their key and for one start of the run."""

    def __init__(self, store: JobStore, secret: Secret | None, start: str = "") -> None:
        self._store = store
        self._secret = secret
        self._start = start

    def put(self, key: str, value: object) -> None:
        text = json.dumps(value)
        tag = "" if self._secret is None else self._tag(self._secret, key, text)
        self._store.set(f"phalanx/tables/{key}", f"{tag}{_BETWEEN}{text}")

    def take(self, key: str, author: str, way_out: str) -> list[object]:
        """Return the values that ``author`` has written at ``key``; ``way_out`` if it has not."""
        try:
            found = bytes(self._store.get(f"phalanx/tables/{key}"))
        except RuntimeError as exc:
            raise PeerTimeout(f"The store of the job has no {key!r}: {exc}. {way_out}") from exc
        tag, _, text = found.decode(errors="replace").partition(_BETWEEN)
        if self._secret is not None and not tag:
            raise ConfigError(
                f"What {author} has written to the job's store ({key!r}) is not signed, but this "
                "process has a secret. Bring its file to the host of that one, too, and name it "
                "there by PHALANX_SECRET_FILE or `secret_file`; if that is done, somebody else "
                "writes to the store."
            )
        if self._secret is None and tag:
            raise ConfigError(
                f"What {author} has written to the job's store ({key!r}) is signed with a secret, "
                "but this process has none. Bring the secret file of the others to this host, and "
                "name it by PHALANX_SECRET_FILE or `secret_file`."
            )
        expected = "" if self._secret is None else self._tag(self._secret, key, text)
        if not hmac.compare_digest(tag.encode(), expected.encode()):
            raise _not_signed(key)
        value: list[object] = json.loads(text)
        return value

    def _tag(self, secret: Secret, key: str, text: str) -> str:
        return secret.sign(f"{key}{_BETWEEN}{self._start}{_BETWEEN}{text}".encode()).hex()


def _not_signed(key: str) -> ConfigError:
    return ConfigError(
        f"{key!r} in the store must be signed with the secret of this run, for this start, but is "
        "not. Bring the same secret file to all hosts, and start again with a store of its own; "
        "if that is done, somebody else writes to the store."
    )


def find_place(store: JobStore, trust: Trust, run: str, rank: int, size: int) -> Place:
    """Say where this process is, and hear where all others are."""
    signed, mine = _SignedStore(store, trust.secret), secrets.token_hex(16)
    signed.put(f"place/{rank}", [this_host(), socket.gethostname(), mine])

    def take(key: str, author: int) -> list[object]:
        way_out = f"See that rank {author} runs and calls `tables.join`."
        return signed.take(key, f"rank {author}", way_out)

    places = [take(f"place/{each}", each) for each in range(size)]
    drawn = [number for *_, number in places]
    if rank == 0:
        signed.put("run", [run, drawn])
    cluster, known = take("run", 0)
    if drawn[rank] != mine or known != drawn:
        raise _not_signed("run")
    hosts = hosts_of([str(host) for host, *_ in places])
    host = hosts.host_of(rank)
    names = tuple(str(places[leader][1]) for leader in hosts.leaders)
    start = str(drawn[0])
    return Place(str(cluster), f"{cluster}-{host}", host, hosts.leaders, names, start, rank)


def meet_hosts(
    store: JobStore, trust: Trust, place: Place, master: str, regions: RunRegions, timeout_s: float
) -> tuple[OtherHosts, ServerWatch]:
    """See that this host has a server, and find those of the others.

    Args:
        store: Of the job.
        trust: Who may speak to servers.
        place: Where this process is.
        master: The address at which the store is: servers listen where it is reached from.
        regions: This host's memory.
        timeout_s: How long to wait for the others.

    Returns:
        The others, and what sees that this host's server is started again.

    Raises:
        ConfigError: Nobody may speak to servers.
        PeerTimeout: Another host has no server in time.
    """
    signed = _SignedStore(store, trust.secret, place.start)
    page, waiting = ServerPage(regions), Waiting(timeout_s + _START_S)
    bind = own_address(master)
    if trust.secret is None and not trust.network and not _is_loopback(bind):
        raise ConfigError(
            "`secret_file` must be given for tables on several hosts, or `trusted_network` be "
            "True, but neither is. Make a secret by `phalanx secret FILE`, bring the file to "
            f"every host, and set PHALANX_SECRET_FILE there; without one, whoever "
            f"reaches {bind} reads and changes the tables."
        )
    me = ProcessIdentity.current()
    spec = ServerSpec(place.run, place.host, place.cluster, bind, trust.secret, me)
    watch = ServerWatch(page, spec)
    try:
        address = watch.wait_for_server(waiting.remaining_s())
        if place.rank == place.leaders[place.host]:
            here = f"Host {place.host} ({place.names[place.host]})"
            signed.put(f"server/{place.host}", [here, address])
        tls = None if trust.secret is None else trust.secret.tls(place.cluster, server=False)
        endpoints = []
        for host, (leader, called) in enumerate(zip(place.leaders, place.names, strict=True)):
            way_out = (
                f"Host {host} ({called}) has not said where its server is. Rank {leader}, the "
                "first process there, starts it: see its output, and start all hosts again."
            )
            name, there = signed.take(f"server/{host}", f"rank {leader}", way_out)
            endpoints.append(Endpoint(host, str(name), str(there), place.cluster, tls))
    except BaseException:
        watch.close(_CLOSE_S)
        raise
    return OtherHosts(place.host, endpoints), watch


def own_address(other: str) -> str:
    """Return the address of this host from which ``other`` is reached.

    Example:
        >>> own_address("127.0.0.1")
        '127.0.0.1'
    """
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing: it asks the kernel for the route
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
