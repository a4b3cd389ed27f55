"""``python -m benchmarks hosts``: tables between hosts, beside torch RPC and a TCP socket.

    phalanx     clients, a worker elsewhere    a matrix half of which lies on the other host
    encrypted   the same                       over TLS
    rpc         as for `tables`
    socket      a client, a server             as many bytes each way over TCP; no row is looked for

One machine simulates two hosts, so a network costs what the kernel does. The servers of tables are
no processes of the contestant, so they are not stopped in the turns of others; idle, they look at
their workers a few times a second. First one client is timed, then many that add at once.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from benchmarks.contest import Outcome, commands_of
from benchmarks.report import OUT, Names, Out, Rounds, Row, Run, Sheet, ratio, read_names
from benchmarks.tables import (
    COLS,
    PATIENCE_S,
    ROWS,
    SIZES,
    Access,
    TableJob,
    Task,
    latencies,
    of_table,
    torch_rpc,
)
from phalanx import tables as phalanx_tables
from phalanx.cluster import make_secret

_SMALL = 10  # rows of a small add
_CLIENTS = 8  # that add at once
_LENGTH = struct.Struct("<Q")
TASKS = tuple(
    Task(kind, rows, of) for of in ("matrix", "local") for rows in SIZES for kind in ("get", "add")
)


@dataclass(frozen=True, kw_only=True)
class HostsJob(TableJob):
    """One process of a contestant.

    Args:
        port: Of the store by which hosts find each other, or of a server.
        secret: A file that holds the hosts' secret.
    """

    port: int
    secret: str

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, that of many clients last."""
        return (*TASKS, Task("add", _SMALL, workers=self.workers))

    @property
    def num_processes(self) -> int:
        """How many processes the contestant has."""
        return self.workers + 1

    def open(self, stack: ExitStack) -> Mapping[str, Access]:
        """Set up, and return what can be done with which rows."""
        return CONTESTANTS[self.contestant](self, stack)

    def rows_of(self, of: str) -> range:
        """Return the rows of the other host, or of the client's."""
        return range(ROWS // 2, ROWS) if of == "local" else range(ROWS // 2)


def _spread(job: HostsJob, stack: ExitStack) -> Mapping[str, Access]:
    """Be a worker of one of two hosts, by torchrun's variables; rank 0 is on the other host."""
    is_client = job.rank < job.workers
    os.environ.update(
        RANK=str(job.rank + 1 if is_client else 0),
        WORLD_SIZE=str(job.workers + 1),
        LOCAL_WORLD_SIZE=str(job.workers if is_client else 1),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_RUN_ID=f"bench-{Path.cwd().parent.name}-{job.contestant}",
        PHALANX_HOST="clients" if is_client else "other",
    )
    secret = job.secret if job.contestant == "encrypted" else None
    group = phalanx_tables.join(secret_file=secret, timeout_s=PATIENCE_S)
    access = of_table(stack.enter_context(group).matrix(ROWS, COLS, name="matrix"))
    return {"matrix": access, "local": access}


def _socket(job: HostsJob, stack: ExitStack) -> Mapping[str, Access]:
    """Send the rows' numbers, and receive as many bytes as the rows have."""
    address = ("127.0.0.1", job.port)
    is_server = job.rank == job.workers
    if is_server:
        listening = stack.enter_context(socket.create_server(address))
        threading.Thread(target=_send_bytes, args=(listening,), daemon=True).start()
    job.join(stack, "listening", 2).barrier()
    if is_server:
        return {}
    connection = stack.enter_context(socket.create_connection(address))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(rows: Tensor, out: Tensor) -> None:
        sent = memoryview(rows.numpy().data).cast("B")
        connection.sendmsg([_LENGTH.pack(len(sent)), sent])
        _receive(connection, memoryview(out.numpy().data).cast("B"))

    return {"matrix": Access(get)}


def _send_bytes(listening: socket.socket) -> None:
    """Answer one client: row numbers of 8 bytes, by as many rows that are ready to be sent."""
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    length, received, rows = bytearray(_LENGTH.size), bytearray(), bytearray()
    while _receive(connection, memoryview(length)):
        [num_bytes] = _LENGTH.unpack(length)
        if len(received) != num_bytes:
            received, rows = bytearray(num_bytes), bytearray(num_bytes // 8 * 4 * COLS)
        if not _receive(connection, memoryview(received)):
            return
        connection.sendall(rows)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill ``into``; return False where the other end is gone."""
    return connection.recv_into(into, 0, socket.MSG_WAITALL) == len(into)


CONTESTANTS: dict[str, Callable[[HostsJob, ExitStack], Mapping[str, Access]]] = {
    "phalanx": _spread,
    "encrypted": _spread,
    "rpc": torch_rpc,
    "socket": _socket,
}


def hosts(
    contestants: Names = "phalanx,encrypted,rpc,socket",
    rounds: Rounds = 8,
    out: Out = OUT,
) -> None:
    """Time get and add of another host's rows, beside torch RPC and a TCP socket."""
    run = Run("hosts", out)
    names = read_names("contestants", contestants, CONTESTANTS)
    together = Task("add", _SMALL, workers=_CLIENTS)
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        make_secret(secret)

        def compete(names: list[str], workers: int, tasks: Mapping[Task, int]) -> Outcome[Task]:
            commands = {}
            for name in names:
                port = _free_port()
                job = HostsJob(contestant=name, workers=workers, port=port, secret=str(secret))
                commands[name] = commands_of(job, job.num_processes)
            return run.compete(f"{workers} clients", commands, tasks, rounds)

        alone = compete(names, 1, {task: number for number, task in enumerate(TASKS)})
        adding = [name for name in names if name != "socket"]
        at_once = compete(adding, _CLIENTS, {together: len(TASKS)}).medians(together)
    title = f"{ROWS:,} × {COLS} float32, 1 client: median µs"
    run.sheets.append(latencies(title, names, {task: alone.medians(task) for task in TASKS}))
    rates = [ratio(1, at_once.get(name)) for name in names]
    of_all: list[Row] = [(f"adds of {_SMALL} rows, 1/s", *rates)]
    run.sheets.append(Sheet(f"{_CLIENTS} clients at once", names, of_all))
    run.publish()


def _free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
