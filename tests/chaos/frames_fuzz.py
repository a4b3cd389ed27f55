"""Frames that almost are ours, by the million: ``make chaos``.

Most go to what reads them: heads, the text of each operation, errors. Some go to a server, from a
peer that is admitted, beside good clients that keep books. Nothing may raise but what is meant to,
nothing may be allocated beyond the caps, and the books must stay right.

The peer speaks as a worker of the run: whoever has the secret may change values. So the books lie
in a table that its messages do not name.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zmq
from rich.console import Console

from phalanx import tables
from phalanx.cluster import Caps, Head
from phalanx.cluster.connection import _error_of
from phalanx.cluster.frames import MAX_TEXT_BYTES, BadFrame, Kind
from phalanx.errors import PhalanxError
from phalanx.ipc import RunDirectory
from phalanx.tables.host_operations import Operation
from phalanx.tables.host_server import ServerPage
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec
from tests.multiprocess.children import Children, Parent
from tests.multiprocess.hosts import become_worker, free_port, variables, wait_for_servers
from tests.unit.cluster.mutations import mutated, mutated_message

CLIENTS = 3
ROWS = 7
DEADLINE_S = 60.0
LIVE_SHARE = 50  # one in so many goes to a server
GROWTH_BYTES = 64 << 20


# --- what reads them ------------------------------------------------------------------------------


def read_everything(num_frames: int, chance: random.Random, progress: Callable[[int], None]) -> int:
    """Read so many; return how many were taken for frames, within the caps."""
    caps, taken = Caps(payload_bytes=1 << 20, in_flight_bytes=1 << 21), 0
    spec = TableSpec.from_mapping(json.loads(SPEC))
    assert spec.rows == ROWS

    def read_head(frame: bytes) -> None:
        head = Head.decode(frame, caps)
        assert head.payload_bytes <= caps.payload_bytes
        assert len(head.text) <= MAX_TEXT_BYTES

    readers: list[tuple[Callable[[bytes], object], bytes]] = [
        (read_head, request(Operation.ADD, 3, 1).encode()),
        (read_head, request(Operation.ADD, 3, 1)._replace(kind=Kind.PIECE).encode()),
        (lambda frame: TableSpec.from_mapping(parsed(frame)), SPEC.encode()),
        (lambda frame: _error_of(frame.decode()), ERROR.encode()),
    ]
    for number in range(num_frames):
        read, good = readers[number % len(readers)]
        try:
            read(mutated(chance, good))
            taken += 1
        except (BadFrame, PhalanxError, UnicodeDecodeError):
            pass
        if number % 10_000 == 0:
            progress(number)
    return taken


def parsed(frame: bytes) -> object:
    try:
        return json.loads(frame)
    except ValueError:
        return None


SPEC = json.dumps(
    {
        "name": "fuzzed",
        "shape": [ROWS, 2],
        "capacity": 0,
        "dtype": "float32",
        "updater": {"name": "sum"},
        "num_shards": 1,
        "staleness": None,
        "nonfinite": "allow",
    }
)
ERROR = json.dumps({"error": "PeerTimeout", "message": "Worker 3 did not come.", "rank": 3})


TWO_ROWS, THEIR_NUMBERS = np.array([0, ROWS - 1]).tobytes(), bytes(16)
PAYLOADS = {
    Operation.GET: TWO_ROWS,
    Operation.ADD: TWO_ROWS + THEIR_NUMBERS,
    Operation.PUT: TWO_ROWS + THEIR_NUMBERS,
    Operation.ADD_TOGETHER: np.array([1, 1]).tobytes() + TWO_ROWS + THEIR_NUMBERS,
}


def request(operation: int, worker: int, incarnation: int) -> Head:
    """Return the head of a request that names two rows of the table."""
    nbytes = len(PAYLOADS.get(Operation(operation), b""))
    together = operation == Operation.ADD_TOGETHER
    args = (2, 2 * together, 0, 0) if nbytes else (0, 1, 0, 0)
    number = int(together or operation == Operation.ADD)
    client = b"frames that lie."
    return Head(
        Kind.REQUEST, operation, worker, incarnation, client, 1, number, args, nbytes, "fuzzed"
    )


# --- a server, and good clients beside ------------------------------------------------------------

ASKED = [
    *(Operation.GET, Operation.ADD, Operation.ADD_TOGETHER, Operation.PUT, Operation.TICK),
    *(
        Operation.ARRIVE,
        Operation.COPY_ALL,
        Operation.COUNTS,
        Operation.KEYS,
        Operation.REPLACE_ALL,
    ),
]


class Faults(logging.Handler):
    """Keeps what a server calls a fault of ours, each by its last line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        self.found.setdefault(text.splitlines()[-1], text)


def keep_books(parent: Parent, given: dict[str, str]) -> None:
    """Be a good client; the first one's process has the server that is fuzzed."""
    threads, faults = become_worker(given), Faults()
    logging.getLogger("phalanx").addHandler(faults)
    logging.getLogger("phalanx").propagate = False
    with tables.join(timeout_s=DEADLINE_S) as world:
        world.matrix(CLIENTS * ROWS, 2, name="fuzzed")
        books = world.matrix(CLIENTS * ROWS, 3, torch.int64, name="books")
        world.barrier()
        parent.tell("here")
        q, before_kib = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while not parent.connection.poll():
            q += 1  # into the first host's rows, which the fuzzed server has
            books.add([[1, q, q * q]], rows=[world.worker_id])
            n = books.get([world.worker_id])[0].tolist()
            assert n == sums(q), f"the books of client {world.worker_id} are wrong: {n}"
        growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) << 10
        parent.tell((q, growth_bytes, [*faults.found.values()]))
        world.barrier()
    wait_for_servers(threads)


def sums(n: int) -> list[int]:
    return [n, n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6]


def enter_as_worker(socket: zmq.Socket[bytes], worker: int) -> None:
    """Become a worker whose incarnation is not that of a good client."""
    text = json.dumps({"num_expected": None, "host": CLIENTS, "home_incarnation": 0})
    for client in (b"a", b"b"):
        head = request(Operation.ENTER, worker, 0)._replace(
            client=16 * client, args=(worker, 0, 0, 0), text=text
        )
        socket.send_multipart([head.encode()])
        assert socket.poll(DEADLINE_S * 1e3)
        answer = Head.decode(socket.recv_multipart()[0], Caps())
        assert answer.kind == Kind.ANSWER
    assert answer.args[1] == 2


def ask_a_server(num_messages: int, chance: random.Random, progress: Callable[[int], None]) -> int:
    """Send so many to a server; return how many adds good clients made beside."""
    name, port = f"fuzz{os.getpid()}", free_port()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Children() as children:
        clients = [
            children.start(keep_books, variables(name, worker, CLIENTS, CLIENTS, port))
            for worker in range(CLIENTS)
        ]
        for client in clients:
            assert client.get() == "here"
        regions = RunRegions(f"torchrun-{name}-0-0")
        address = ServerPage(regions, create=False).address
        assert address is not None
        regions.close()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        enter_as_worker(socket, CLIENTS)
        for number in range(num_messages):
            operation = chance.choice(ASKED)
            head = request(operation, CLIENTS, 2)
            frames = [head.encode(), PAYLOADS.get(operation, b"")]
            assert socket.poll(DEADLINE_S * 1e3, zmq.POLLOUT), "the server has stopped to read"
            socket.send_multipart(mutated_message(chance, frames))
            while socket.poll(0):
                socket.recv_multipart()
            if number % 1000 == 0:
                progress(number)
        for client in clients:
            client.put("enough")
        told = [client.get() for client in clients]
    context.destroy(linger=0)
    RunDirectory.sweep()
    for _, growth_bytes, faults in told:
        assert not faults, "\n".join(faults)
        assert growth_bytes < GROWTH_BYTES, f"a process has grown by {growth_bytes} bytes"
    return sum(q for q, _, _ in told)


# --- both -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What was seen.

    Attributes:
        read: Frames that readers were given.
        taken: Those that are frames all the same.
        asked: Messages that a server was sent.
        adds: Of good clients beside; all of them are right.
        seconds: How long it took.
    """

    read: int
    taken: int
    asked: int
    adds: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.read} mutated frames read, {self.taken} of them within what is allowed; "
            f"{self.asked} messages to a server beside {self.adds} adds of good clients, all there "
            f"once; {self.seconds:.0f} s"
        )


def fuzz(num_frames: int, seed: int, progress: Callable[[int], None] = lambda _: None) -> Result:
    """Read so many mutated frames, and ask a server some of them."""
    chance, began, asked = random.Random(seed), time.perf_counter(), num_frames // LIVE_SHARE
    taken = read_everything(num_frames - asked, chance, progress)
    adds = ask_a_server(asked, chance, lambda number: progress(num_frames - asked + number))
    return Result(num_frames - asked, taken, asked, adds, time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    console = Console()
    with console.status("mutating") as status:
        result = fuzz(
            options.frames,
            options.seed,
            lambda n: status.update(f"frame {n:,} of {options.frames:,}"),
        )
    console.print(f"{result} (seed {options.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
