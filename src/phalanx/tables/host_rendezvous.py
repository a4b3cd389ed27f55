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
import socket
from collections import Counter
from typing import Any, NamedTuple, Protocol

from phalanx.cluster import Endpoint, Secret
from phalanx.distributed import hosts_of, this_host
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.ipc import ProcessIdentity, Waiting
from phalanx.tables.host_server import ServerPage, ServerSpec, ServerWatch
from phalanx.tables.run_regions import RunRegions

_START_S = 60.0  # of a server on a busy machine
_CLOSE_S = 5.0
_met: Counter[str] = Counter()  # how often this process has met others, by the name it was given


class JobStore(Protocol):
    """What is used of a store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class HostPlace(NamedTuple):
    """Where a process of the run is.

    Attributes:
        host: This host's number.
        leaders: The first rank of each host, which tells the others of its server.
        names: What each host calls itself.
    """

    host: int
    leaders: tuple[int, ...]
    names: tuple[str, ...]


class Meeting:
    """One process that looks for the others of its run.

    Args:
        store: Of the job.
        secret: What connections are encrypted with; None in a network that is trusted.
        name: Of what has started the processes, the same on all hosts.
        rank: This process's.
        size: The number of processes.

    Attributes:
        place: Where this process is.
        run_here: The run's name on this host: one machine may simulate several.

    Raises:
        ConfigError: Some processes have a secret, and others have none.
        PeerTimeout: One did not say where it is.
    """

    def __init__(
        self, store: JobStore, secret: Secret | None, name: str, rank: int, size: int
    ) -> None:
        self._store = store
        self._secret = secret
        self._name = name
        self._run = f"{name}-{_met[name]}" if _met[name] else name
        self._rank = rank
        self.place = self._find_place(size)
        self.run_here = f"{self._run}-{self.place.host}"

    def _put(self, key: str, value: object) -> None:
        self._store.set(f"phalanx/tables/{self._run}/{key}", json.dumps(value))

    def _take(self, key: str, way_out: str) -> Any:  # Any: JSON
        try:
            return json.loads(self._store.get(f"phalanx/tables/{self._run}/{key}"))
        except RuntimeError as exc:
            raise PeerTimeout(f"The store of the job has no {key!r}: {exc}. {way_out}") from exc

    def _find_place(self, size: int) -> HostPlace:
        has_secret = self._secret is not None
        self._put(f"place/{self._rank}", [this_host(), socket.gethostname(), has_secret])
        places = [
            self._take(f"place/{rank}", f"See that rank {rank} runs and calls `tables.join`.")
            for rank in range(size)
        ]
        others = [rank for rank, place in enumerate(places) if place[2] != has_secret]
        if others:
            have, has = ("none", "one") if has_secret else ("one", "none")
            raise ConfigError(
                f"All processes of a run must have its secret, or none, but rank {others[0]} has "
                f"{have} and this one has {has}. Bring the secret file to all hosts, and name it "
                "there by PHALANX_SECRET_FILE or `secret_file`."
            )
        hosts = hosts_of([str(host) for host, *_ in places])
        names = tuple(str(places[leader][1]) for leader in hosts.leaders)
        return HostPlace(hosts.host_of(self._rank), hosts.leaders, names)

    def meet_hosts(
        self, bind: str, regions: RunRegions, timeout_s: float
    ) -> tuple[list[Endpoint], ServerWatch]:
        """See that this host has a server, and find those of the others.

        Args:
            bind: The address at which this host's server listens.
            regions: This host's memory.
            timeout_s: How long to wait for the others.

        Returns:
            The servers of all hosts, and what sees that this host's server is started again.

        Raises:
            PeerTimeout: A host has no server in time.
        """
        host, leaders, names = self.place
        page, waiting = ServerPage(regions), Waiting(timeout_s + _START_S)
        me = ProcessIdentity.current()
        spec = ServerSpec(self.run_here, host, self._run, bind, self._secret, me)
        watch = ServerWatch(page, spec)
        try:
            address = watch.wait_for_server(waiting.remaining_s())
            if self._rank == leaders[host]:
                self._put(f"server/{host}", address)
            tls = None if self._secret is None else self._secret.tls(server=False)
            endpoints = []
            for number, (leader, name) in enumerate(zip(leaders, names, strict=True)):
                title = f"Host {number} ({name})"
                way_out = (
                    f"{title} has not said where its server is. Rank {leader}, the first process "
                    "there, starts it: see its output, and start all hosts again."
                )
                there = str(self._take(f"server/{number}", way_out))
                endpoints.append(Endpoint(number, title, there, self._run, tls))
        except BaseException:
            watch.close(_CLOSE_S)
            raise
        _met[self._name] += 1
        return endpoints, watch


def address_to_serve_at(master: str, secret: Secret | None, *, trusted_network: bool) -> str:
    """Return the address at which this host's server listens: where the store is reached from.

    Raises:
        ConfigError: Nobody may speak to servers.
    """
    address = own_address(master)
    if secret is None and not trusted_network and not ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            "`secret_file` must be given for tables on several hosts, or `trusted_network` be "
            "True, but neither is. Make a secret by `phalanx secret FILE`, bring the file to "
            "every host, and set PHALANX_SECRET_FILE there; without one, whoever "
            f"reaches {address} reads and changes the tables."
        )
    return address


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
