"""Frames that almost are ours, by the million: ``make chaos``.

Most go to what reads them: heads, the text of each operation, errors. Some go to a server, from a
peer that is admitted, beside good clients that keep books. Nothing may raise but what is meant to,
nothing may be allocated beyond the caps, and the books must stay right.

The peer speaks as a worker of the run: whoever has the secret may change values. So the books lie
in a table that its messages do not name.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.cluster import Endpoint, Message, tag_of
from phalanx.cluster.connection import _error_of
from phalanx.cluster.frames import MAX_TEXT_BYTES, BadFrame, Kind, Stream, described, empty_tensors
from phalanx.errors import PhalanxError
from phalanx.ipc import RunDirectory
from phalanx.tables.host_server import ServerPage
from phalanx.tables.router import Operation
from phalanx.tables.spec import TableSpec
from tests.chaos import command, server_kills
from tests.multiprocess.children import Children, Parent
from tests.multiprocess.hosts import free_port, regions_on, run_on, variables

CLIENTS = 3
ROWS = 7
TAIL = 5
DEADLINE_S = 60.0
ANSWER_S = 0.2  # of a message that may be half of one
LIVE_SHARE = 1000  # one in so many goes to a server
GROWTH_BYTES = 64 << 20
MOST_BYTES = 1 << 20
TAG = tag_of("run")


# --- what reads them ------------------------------------------------------------------------------


def read_everything(num_frames: int, chance: random.Random, progress: Callable[[int], None]) -> int:
    """Read so many; return how many were taken for frames, within the caps."""
    taken = 0
    spec = TableSpec.from_json(SPEC)
    assert spec.rows == ROWS

    def read_head(frame: bytes) -> None:
        _, text_bytes, num_tensors = Message.decode(frame, TAG)
        assert text_bytes <= MAX_TEXT_BYTES
        assert num_tensors <= 16

    def read_tensors(frame: bytes) -> None:
        tensors = empty_tensors(frame[: len(frame) // 20 * 20], MOST_BYTES)
        assert sum(each.nbytes for each in tensors) <= MOST_BYTES

    readers: list[tuple[Callable[[bytes], object], bytes]] = [
        (read_head, request(Operation.TELL, 3, 1)._replace(text="").encode(TAG)),
        (read_tensors, b"".join(map(described, TENSORS[Operation.ADD]))),
        (lambda frame: TableSpec.from_json(frame.decode(errors="replace")), SPEC.encode()),
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


def mutated(chance: random.Random, frame: bytes) -> bytes:
    """Return bytes that almost are a frame: one to four are changed, some are cut short."""
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    if changed and chance.random() < 0.1:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


SPEC = json.dumps(
    {
        "name": "fuzzed",
        "rows": ROWS,
        "cols": 2,
        "is_array": False,
        "has_keys": False,
        "dtype": "float32",
        "updater": {"name": "sum"},
        "first_row": 0,
        "staleness": None,
        "rule": None,
    }
)
ERROR = json.dumps({"error": "PeerTimeout", "message": "Worker 3 did not come.", "rank": 3})


TWO_ROWS = torch.tensor([0, ROWS - 1])
TENSORS = {
    Operation.GET: [TWO_ROWS],
    Operation.ADD: [TWO_ROWS, torch.zeros((2, 1), dtype=torch.int64)],
}


def request(operation: int, worker: int, incarnation: int) -> Message:
    """Return a request that names two rows of the table."""
    return Message(
        Kind.REQUEST,
        operation,
        worker,
        incarnation,
        number=int(operation == Operation.ADD),
        timeout_ms=100,
        text="whole",
        tensors=TENSORS.get(Operation(operation), []),
    )


# --- a server, and good clients beside ------------------------------------------------------------

NOT_ASKED = {"TELL", "LEAVE", "OPEN", "AWAIT_ROUND"}
ASKED = [operation for operation in Operation if operation.name not in NOT_ASKED]


def keep_faults(folder: Path) -> None:
    """Have what servers forked later call a fault of ours written to a file of ``folder``."""
    handler = logging.FileHandler(folder / f"faults-{os.getpid()}", delay=True)
    logging.getLogger("phalanx").addHandler(handler)
    logging.getLogger("phalanx").propagate = False


def keep_books(parent: Parent, given: dict[str, str], folder: Path) -> None:
    """Be a good client; the first one's host has the server that is fuzzed."""
    keep_faults(folder)
    server_kills.keep_books(parent, given, CLIENTS, CLIENTS, TAIL)


class Peer:
    """A worker that is admitted, and sends what it should not."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session = endpoint.connect(DEADLINE_S)
        self.tag = tag_of(endpoint.run)
        # Twice, so that its incarnation is not that of a good client.
        for operation in (Operation.TELL, Operation.LEAVE, Operation.TELL):
            incarnation = int(operation == Operation.LEAVE)
            asked = request(operation, CLIENTS, incarnation)
            self._session.send(asked._replace(args=(1, 0)))
            answer = self._session.receive(0)
            assert answer.kind == Kind.ANSWER
        assert answer.args[0] == 2
        self._stream: Stream | None = None

    def send(self, content: bytes) -> None:
        """Send bytes over a connection that may be closed already, or after them."""
        if self._stream is None:
            self._stream = self._endpoint.connect(DEADLINE_S)
        self._stream.set_timeout(ANSWER_S)
        try:
            self._stream._socket.sendall(content)
            self._stream.receive(MOST_BYTES)
        except (OSError, EOFError):  # closed, or bytes are missing
            self._stream.close()
            self._stream = None


def ask_a_server(num_messages: int, chance: random.Random, progress: Callable[[int], None]) -> int:
    """Send so many to a server; return how many adds good clients made beside."""
    name, port = f"fuzz{os.getpid()}", free_port()
    with Children() as children, tempfile.TemporaryDirectory() as folder:
        clients = [
            children.start(
                keep_books, variables(name, worker, CLIENTS, CLIENTS, port), Path(folder)
            )
            for worker in range(CLIENTS)
        ]
        for client in clients:
            assert client.get() == "here"
        run = run_on(name, 0)
        regions = regions_on(name, 0)
        page = ServerPage(regions, create=False)
        assert page.is_served
        server = page.serving.owner
        peer = Peer(Endpoint(0, "Host 0", page.address, run, None))
        before = resident_bytes(server)
        for number in range(num_messages):
            operation = chance.choice(ASKED)
            asked = request(operation, CLIENTS, 2)
            good = b"".join(
                [asked.encode(peer.tag), *(each.numpy().tobytes() for each in asked.tensors)]
            )
            peer.send(mutated(chance, good))
            if number % 1000 == 0:
                progress(number)
        growth_bytes = resident_bytes(server) - before
        assert page.serving.owner == server, "the server has died"
        regions.close()
        counts, _ = server_kills.close_books(clients)
        faults = "\n".join(each.read_text() for each in Path(folder).glob("faults-*"))
    RunDirectory.sweep()
    assert not faults, faults
    assert growth_bytes < GROWTH_BYTES, f"the server has grown by {growth_bytes} bytes"
    return 2 * sum(counts)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


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


def fuzz(num_frames: int, seed: int, progress: command.Progress = lambda _: None) -> Result:
    """Read so many mutated frames, and ask a server some of them."""
    chance, began, asked = random.Random(seed), time.perf_counter(), num_frames // LIVE_SHARE
    taken = read_everything(num_frames - asked, chance, progress)
    adds = ask_a_server(asked, chance, lambda number: progress(num_frames - asked + number))
    return Result(num_frames - asked, taken, asked, adds, time.perf_counter() - began)


if __name__ == "__main__":
    command.run(fuzz, faults="frames", number=10_000_000)
