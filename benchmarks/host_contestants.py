"""What the processes of ``make bench-hosts`` run: clients on one host, and who owns the rows.

    phalanx     clients, 1 worker elsewhere   a table on two hosts, played on one machine; each has
                                              its server, a process that is nobody's contestant
    encrypted   the same                      with a secret, so over TLS
    one-host    clients                       a table of one host, for local rows
    rpc         clients, the server           torch.distributed.rpc; the server owns the matrix
    ray         clients                       an actor of Ray's owns the matrix
    socket      clients, the server           as many bytes each way over TCP; no row is looked for

Every process has one intra-op thread. The first process is a client, and the one that is timed.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.host_tasks import TASKS, take_turn
from benchmarks.processes import Command, command_of
from benchmarks.table_peers import PATIENCE_S, Access, ray_matrix, rpc_matrix
from benchmarks.table_tasks import COLS, Draws, Steps
from benchmarks.turns import serve_turns
from phalanx import tables

SECRET = "secret"  # the file's name in a contestant's folder
_WITH_A_SERVER = ("phalanx", "encrypted", "rpc", "socket")
_ROW_BYTES = 4 * COLS
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class HostsJob:
    """One process of one contestant.

    Args:
        rows: Of the matrix; the second half lies on the clients' host.
        num_clients: Processes that get and add.
        folder: Where a contestant's processes find each other.
        turn_s: How long they work at a task in a turn.
        port: Of the store by which hosts find each other, or of a server.
        process: The clients come first, who owns the others' rows last.
    """

    contestant: str
    rows: int
    num_clients: int
    folder: str
    turn_s: float
    port: int
    process: int = 0

    @property
    def is_client(self) -> bool:
        """Whether this process gets and adds."""
        return self.process < self.num_clients

    def run(self) -> None:
        """Be the process."""
        torch.set_num_threads(1)
        serve_turns(self._turns())

    @contextmanager
    def _turns(self) -> Iterator[Callable[[int], list[float]]]:
        with CONTESTANTS[self.contestant](self) as steps:
            yield lambda number: take_turn(
                TASKS[number],
                steps,
                self.num_clients,
                is_client=self.is_client,
                turn_s=self.turn_s,
            )


def _access(job: HostsJob, access: Access, meet: Callable[[], object]) -> Steps:
    """Return what a client does with a matrix; its own host has the second half of the rows."""
    half = job.rows // 2
    remote = Draws(rank=job.process, num_rows=half)
    local = Draws(rank=job.process, num_rows=job.rows - half, first_row=half)
    return Steps(
        makers={
            "get": remote.getting(access.get),
            "add": remote.adding(access.add),
            "flood": remote.adding(access.add),
            "local get": local.getting(access.get),
            "local add": local.adding(access.add),
        },
        meet=meet,
    )


def _only(steps: Steps, *kinds: str) -> Steps:
    return replace(steps, makers={kind: steps.makers[kind] for kind in kinds})


@contextmanager
def _meeting(job: HostsJob) -> Iterator[Callable[[], object]]:
    """Yield what clients begin and end a flood by; nothing is shared."""
    name = f"bench-{Path(job.folder).name}-{job.contestant}-meeting"
    num_workers = job.num_clients + (job.contestant in _WITH_A_SERVER)
    with tables.join(name, num_workers=num_workers, timeout_s=PATIENCE_S) as world:
        yield world.barrier


# --- tables ---------------------------------------------------------------------------------------


@contextmanager
def _spread(job: HostsJob) -> Iterator[Steps]:
    """Be told by variables, as torchrun does, to be a worker of one of two hosts.

    The other host's worker has rank 0, which makes it the first host.
    """
    rank = job.process + 1 if job.is_client else 0
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.num_clients + 1),
        LOCAL_WORLD_SIZE=str(job.num_clients if rank else 1),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_RUN_ID=f"bench-{Path(job.folder).name}-{job.contestant}",
        PHALANX_HOST="clients" if rank else "other",
    )
    secret = str(Path(job.folder) / SECRET) if job.contestant == "encrypted" else None
    with tables.join(secret_file=secret, timeout_s=PATIENCE_S) as world:
        matrix = world.matrix(job.rows, COLS, name="matrix")
        yield _access(job, _of_table(matrix), world.barrier)


@contextmanager
def _one_host(job: HostsJob) -> Iterator[Steps]:
    name = f"bench-{Path(job.folder).name}-{job.contestant}"
    with tables.join(name, num_workers=job.num_clients, timeout_s=PATIENCE_S) as world:
        matrix = world.matrix(job.rows, COLS, name="matrix")
        yield _only(_access(job, _of_table(matrix), world.barrier), "local get", "local add")


def _of_table(matrix: tables.Table) -> Access:
    return Access(
        get=lambda rows, out: matrix.get(rows, out=out),
        add=lambda rows, delta: matrix.add(delta, rows),
    )


# --- peers ----------------------------------------------------------------------------------------


@contextmanager
def _rpc(job: HostsJob) -> Iterator[Steps]:
    with (
        rpc_matrix(job.process, job.num_clients, job.rows, job.folder) as access,
        _meeting(job) as meet,
    ):
        yield _only(_access(job, access, meet), "get", "add", "flood")


@contextmanager
def _ray(job: HostsJob) -> Iterator[Steps]:
    with ray_matrix(job.process, job.rows, job.folder) as access, _meeting(job) as meet:
        yield _only(_access(job, access, meet), "get", "add", "flood")


@contextmanager
def _socket(job: HostsJob) -> Iterator[Steps]:
    """Send the rows' numbers, and receive as many bytes as the rows have."""
    with _meeting(job) as meet:
        if not job.is_client:
            with socket.create_server(("127.0.0.1", job.port)) as listening:
                meet()
                serving = threading.Thread(target=_send_bytes, args=(listening,), daemon=True)
                serving.start()
                yield Steps(makers={}, meet=meet)
            return
        meet()
        with socket.create_connection(("127.0.0.1", job.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def get(ids: Tensor, out: Tensor) -> None:
                _ask_for_bytes(connection, ids, out)

            access = Access(get, get)
            yield _only(_access(job, access, meet), "get")


def _ask_for_bytes(connection: socket.socket, ids: Tensor, out: Tensor) -> None:
    sent = memoryview(ids.numpy().data).cast("B")
    connection.sendmsg([_LENGTH.pack(len(sent)), sent])
    _receive(connection, memoryview(out.numpy().data).cast("B"))


def _send_bytes(listening: socket.socket) -> None:
    """Answer one client: numbers of 8 bytes by as many rows, ready to be sent."""
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    length, received, rows = bytearray(_LENGTH.size), bytearray(), bytearray()
    while _receive(connection, memoryview(length)):
        [num_bytes] = _LENGTH.unpack(length)
        if len(received) != num_bytes:
            received, rows = bytearray(num_bytes), bytearray(num_bytes // 8 * _ROW_BYTES)
        if not _receive(connection, memoryview(received)):
            return
        connection.sendall(rows)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill ``into``; return False where the other end is gone."""
    while into:
        received = connection.recv_into(into)
        if not received:
            return False
        into = into[received:]
    return True


CONTESTANTS: dict[str, Callable[[HostsJob], AbstractContextManager[Steps]]] = {
    "phalanx": _spread,
    "encrypted": _spread,
    "one-host": _one_host,
    "rpc": _rpc,
    "ray": _ray,
    "socket": _socket,
}


def commands_of(job: HostsJob) -> list[Command]:
    """Return the command lines that run ``job``."""
    processes = range(job.num_clients + (job.contestant in _WITH_A_SERVER))
    return [command_of(replace(job, process=process)) for process in processes]
