"""How the launchers and the ranks of a job find each other.

    one host        the ranks by a file in the job's folder, which only this user may open
    several hosts   the launchers by torch's store over TCP, at the address that was named where
                    that is one of this host's; the ranks by another, as torch does it

`init_process_group()` asks torch's rendezvous `env://`, which makes a store over TCP. In the ranks
of a job on one host we answer that request with the file instead.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import DistStoreError, FileStore, HashStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from phalanx.distributed.hosts import INTERFACES, loopback
from phalanx.distributed.open_store import FOLDER
from phalanx.ipc import late_peers, wait_until
from phalanx.torch_internals import rendezvous_handlers

__all__ = ["ONE_HOST", "SEVERAL_HOSTS", "meet_in_folder"]

ONE_HOST = "phalanx-one-host"
"""The launcher's rendezvous for a job on one host, by the name that torch's launcher takes."""

SEVERAL_HOSTS = "phalanx-several-hosts"
"""That for several hosts."""

_DEFAULT_PORT = 29400  # torch's
_STORE_S = 60.0
_SCHEME = "env"
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


class _OneHost(RendezvousHandler):
    """The rendezvous of a launcher that waits for no other: it needs no store that is shared."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = HashStore()

    def get_backend(self) -> str:
        return ONE_HOST

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # A free port, for scripts that open a server of their own at MASTER_PORT.
        address = RendezvousStoreInfo.build(0, self._store, local_addr="localhost")
        return RendezvousInfo(self._store, 0, 1, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _one_host(parameters: RendezvousParameters) -> RendezvousHandler:
    return _OneHost(parameters.run_id)


class _Backend(C10dRendezvousBackend):
    """torch's, under the name that we have registered."""

    @property
    def name(self) -> str:
        return SEVERAL_HOSTS


def _several_hosts(parameters: RendezvousParameters) -> RendezvousHandler:
    """Do as torch's rendezvous `c10d` does, but open its store at the address that was named only.

    A name that means a loopback address here only (as Debian's hosts have it) says nothing of where
    others look for it, so then torch decides, and its store listens at all addresses.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORT)
    try:
        fd = _listen(host, port)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:  # by another launcher of this host
            parameters.config["is_host"] = False
        fd = None
    store = create_backend(parameters)[1] if fd is None else _open_store(host, port, fd)
    return _SeveralHosts(create_handler(store, _Backend(store, parameters.run_id), parameters))


class _SeveralHosts(RendezvousHandler):
    """torch's handler, but for the store of an agent.

    An agent whose ranks have ended waits in that store for all other agents. In torch's own it
    waits for 300 s for one that has failed and is gone, and meanwhile hears no signal.
    """

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self._handler = handler

    def get_backend(self) -> str:
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        met = self._handler.next_rendezvous()
        store = _AgentStore(met.store, self._handler.is_closed)
        address = met.bootstrap_store_info
        assert address is not None, "torch's handler gives one"
        return RendezvousInfo(store, met.rank, met.world_size, address)

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        return self._handler.shutdown()


class _AgentStore(Store):
    """``store``, in which a wait hears signals, and ends when an agent has closed the rendezvous.

    Agents close it when they end: after all have met for the last time, or because one has failed.
    """

    def __init__(self, store: Store, is_closed: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_closed = is_closed

    @property
    def timeout(self) -> datetime.timedelta:
        found: datetime.timedelta = self._store.timeout  # type: ignore[attr-defined]  # stubs
        return found

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        longest = self.timeout if timeout is None else timeout

        def check() -> None:
            if self._is_closed() and not self._store.check(keys):
                raise DistStoreError(f"{', '.join(keys)} will not come: an agent has ended before.")

        if not wait_until(lambda: self._store.check(keys), longest.total_seconds(), check):
            raise DistStoreError(f"{', '.join(keys)} did not come.")


def _listen(host: str, port: int) -> int | None:
    """Return a socket that listens at ``host``; None where that would hide it from other hosts."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    if ipaddress.ip_address(address[0]).is_loopback and not _is_loopback_by_name(host):
        return None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # fails where the address is another host's
        listener.listen()
        return listener.detach()


def _is_loopback_by_name(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _open_store(host: str, port: int, fd: int) -> Store:
    timeout = datetime.timedelta(seconds=_STORE_S)
    try:
        return TCPStore(
            host, port, is_master=True, timeout=timeout, multi_tenant=True, master_listen_fd=fd
        )
    except RuntimeError as exc:
        raise RendezvousConnectionError(
            f"The store of `endpoint` could not be opened at {host}:{port}: {exc}"
        ) from exc


rendezvous_handler_registry.register(ONE_HOST, _one_host)
rendezvous_handler_registry.register(SEVERAL_HOSTS, _several_hosts)


def meet_in_folder(folder: Path) -> None:
    """Let `init_process_group()` of this rank use a store in ``folder``, and no network.

    Where the script has changed the rank, the size or the address that the launcher set, it makes
    a group of its own, and torch's way is taken. Gloo, where the script asks for it, is told to
    listen on the loopback interface only, unless the user has named another.

    # Note [A store per group]
    A script may destroy its group and make another, which must not find the addresses of the first.
    So rank 0 makes a new file for each, and the others wait for it: they take the files in order.
    """
    os.environ[FOLDER] = str(folder)
    interface = loopback()
    if interface is not None:
        os.environ.setdefault(INTERFACES, interface)
    launched = {name: os.environ.get(name) for name in _LAUNCHED}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given = {"rank": [str(rank)], "world_size": [str(size)]}
    attempt = launched["TORCHELASTIC_RESTART_COUNT"]
    # Torch has no public way to replace the handler of a scheme that it knows.
    ask_torch = rendezvous_handlers[_SCHEME]
    num_met = 0

    def meet(
        url: str,
        timeout: datetime.timedelta = default_pg_timeout,
        **more: Any,  # torch's, passed on as it comes
    ) -> Iterator[tuple[Store, int, int]]:
        nonlocal num_met
        asked = {**given, **parse_qs(urlsplit(url).query)}
        if asked != given or any(os.environ.get(n) != v for n, v in launched.items()):
            yield from ask_torch(url, timeout=timeout, **more)
            return
        path = folder / f"store-{attempt}-{num_met}"
        if rank != 0:
            timeout_s = timeout.total_seconds()
            if not wait_until(path.exists, timeout_s):
                raise late_peers("Rank", [0], size, "make the group", timeout_s)
        store = FileStore(str(path))
        store.set_timeout(timeout)
        num_met += 1
        yield store, rank, size

    rendezvous_handlers[_SCHEME] = meet
