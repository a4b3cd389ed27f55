"""Servers of hosts, killed at random under workers that keep books: ``make chaos``.

Eight clients on three hosts add, over and over, to the rows and keys of `tests/chaos/books.py`.

An add is whole or absent per host: there the tail's rows are always equal. Meanwhile a host's
server is killed at a random moment, again and again. How long it takes until the host answers is
measured from the kill.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from phalanx import tables
from phalanx.cluster import Connection, Endpoint, Secret, make_secret
from phalanx.tables import part
from phalanx.tables.host_server import ServerPage
from phalanx.tables.router import Operation
from tests.chaos import command
from tests.chaos.books import Books
from tests.multiprocess.children import Child, Children, Parent, wait_for_exit
from tests.multiprocess.hosts import become_worker, free_port, regions_on, run_on, variables
from tests.run_directories import wait_until_removed

HOSTS = 3
CLIENTS = 8
TAIL = 301
LONGEST_GAP_S = 0.1
DEADLINE_S = 60.0
_numbers = itertools.count()


def keep_books(parent: Parent, given: dict[str, str], clients: int, hosts: int, tail: int) -> None:
    """Be a client: add and read back until the parent speaks, then compare all books."""
    become_worker(given)
    with tables.join(timeout_s=DEADLINE_S) as world:
        books, me, q = Books(world, clients, hosts, tail), world.worker_id, 0

        def check(client: int, q: int) -> None:
            assert books.count("rows", client) == [q] * hosts
            assert books.count("keys", client) == [q]

        world.barrier()
        parent.tell("here")
        while not parent.connection.poll():
            q += 1
            for book in ("rows", "keys"):
                books.add(book, me, q)
            check(me, q)
            books.count_tail(q % hosts)
        assert parent.hear() == "enough"
        parent.tell(q)
        counts = parent.hear()
        for client, q in enumerate(counts):
            check(client, q)
        assert [books.count_tail(host) for host in range(hosts)] == [sum(counts)] * hosts
        books.check_own_keys(counts)
        parent.tell(
            sum(t._storage.here.part._header[part.UNDONE] for t in (books.rows, books.keys))
        )
        world.barrier()
    parent.tell("left")


def close_books(clients: Sequence[Child]) -> tuple[list[int], int]:
    """Let clients compare all books; return how often each has added, and the adds undone."""
    for client in clients:
        client.put("enough")
    counts = [client.get() for client in clients]
    for client in clients:
        client.put(counts)
    return counts, max(client.get() for client in clients)


@dataclass
class Result:
    """What was seen.

    Attributes:
        adds: Of all clients, to both books; each was acknowledged.
        recoveries_s: Times from a kill of a server to the host's next answer.
        undone: Adds on one host that a kill interrupted and the next server undid.
        seconds: How long the kills took.
    """

    adds: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    undone: int = 0
    kills: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def p50_s(self) -> float:
        return statistics.median(self.recoveries_s)

    def __str__(self) -> str:
        p99_s = sorted(self.recoveries_s)[int(0.99 * len(self.recoveries_s))]
        return (
            f"{sum(self.kills.values())} kills in {self.seconds:.0f} s: {self.adds} adds of "
            f"{CLIENTS} clients, none lost and none doubled; {self.undone} were undone on a host\n"
            f"recovery: p50 {1e3 * self.p50_s:.0f} ms, p99 {1e3 * p99_s:.0f} ms, longest "
            f"{1e3 * max(self.recoveries_s):.0f} ms"
        )


class Target:
    """A host's server, as the one who kills it sees it."""

    def __init__(self, name: str, host: int, secret: Secret) -> None:
        self.host = host
        run = run_on(name, host)
        self._regions = regions_on(name, host)
        self._page = ServerPage(self._regions, create=False)
        tls = secret.tls(server=False)
        endpoint = Endpoint(host, f"Host {host}", self._page.address, run, tls)
        self._connection = Connection(endpoint)
        self.ask()

    def ask(self) -> None:
        """Wait for an answer of the server."""
        nothing = [torch.empty(0, dtype=torch.int64)]
        self._connection.call(Operation.GET, "a get", DEADLINE_S, text="rows", tensors=nothing)

    def kill(self) -> float:
        """Kill the server; return how long it took until the host answered."""
        server = self._page.serving.owner
        assert server
        began = time.perf_counter()
        os.kill(server, signal.SIGKILL)
        wait_for_exit(server)
        self.ask()
        return time.perf_counter() - began

    def close(self) -> None:
        self._connection.close()
        self._regions.close()


@contextmanager
def clients_on_hosts(name: str, folder: Path) -> Iterator[list[Child]]:
    """Start the clients, which add when this is entered."""
    port = free_port()
    make_secret(folder / "secret")
    with Children() as children:
        clients = []
        for worker in range(CLIENTS):
            given = variables(name, worker, CLIENTS, HOSTS, port)
            given["PHALANX_SECRET_FILE"] = str(folder / "secret")
            clients.append(children.start(keep_books, given, CLIENTS, HOSTS, TAIL))
        for client in clients:
            assert client.get() == "here"
        yield clients


def soak(kills: int, seed: int, progress: command.Progress = lambda _: None) -> Result:
    """Kill so many servers; fail where the books are not right."""
    result, draw = Result(), random.Random(seed)
    name = f"kills{os.getpid()}-{next(_numbers)}"
    with tempfile.TemporaryDirectory() as folder, clients_on_hosts(name, Path(folder)) as clients:
        secret = Secret.read(Path(folder) / "secret")
        targets = [Target(name, host, secret) for host in range(HOSTS)]
        began = time.perf_counter()
        for number in range(1, kills + 1):
            threading.Event().wait(draw.uniform(0.0, LONGEST_GAP_S))
            # Each host dies at least once, however few the kills are.
            target = targets[number - 1] if number <= HOSTS else draw.choice(targets)
            result.recoveries_s.append(target.kill())
            result.kills[target.host] += 1
            for client in clients:
                if client.connection.poll():  # it says nothing yet, unless it has failed
                    client.get()
            progress(number)
        result.seconds = time.perf_counter() - began
        counts, result.undone = close_books(clients)
        result.adds = 2 * sum(counts)
        for target in targets:
            target.close()
        for client in clients:
            assert client.get() == "left"
    assert min(counts) > 0
    wait_until_removed(name)
    return result


if __name__ == "__main__":
    command.run(soak, faults="kills", number=2000)
