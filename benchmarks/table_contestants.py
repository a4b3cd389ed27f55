"""What the processes of ``make bench-tables`` run: each contestant's get and add.

    phalanx   worker 0, worker 1                 tables in memory that both map
    torch     worker 0, worker 1                 private memory each, torch's own kernels
    rpc       worker 0, worker 1, the server     torch.distributed.rpc; the server owns the matrix
    ray       worker 0, worker 1                 an actor of Ray's owns the matrix
    snapshot  worker 0, worker 1                 phalanx, with a table as large as the snapshot

Every worker has one intra-op thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.processes import Command, command_of
from benchmarks.table_peers import PATIENCE_S, ray_matrix, rpc_matrix
from benchmarks.table_tasks import ARRAY_ELEMENTS, COLS, TASKS, Draws, Steps, take_turn
from benchmarks.turns import serve_turns
from phalanx import tables

_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TablesJob:
    """One process of one contestant.

    Args:
        rows: Of the matrix.
        folder: Where a contestant's processes find each other; a snapshot goes there too.
        turn_s: How long they work at a task in a turn.
    """

    contestant: str
    rows: int
    folder: str
    turn_s: float
    rank: int = 0

    def run(self) -> None:
        """Be the process."""
        torch.set_num_threads(1)
        serve_turns(self._turns())

    @contextmanager
    def _turns(self) -> Iterator[Callable[[int], list[float]]]:
        draws = Draws(rank=self.rank, num_rows=self.rows)
        with CONTESTANTS[self.contestant](self, draws) as steps:
            yield lambda number: take_turn(TASKS[number], self.rank, steps, self.turn_s)


def _join(job: TablesJob) -> tables.TableGroup:
    name = f"bench-{Path(job.folder).name}-{job.contestant}"
    return tables.join(name, num_workers=2, timeout_s=PATIENCE_S)


@contextmanager
def _phalanx(job: TablesJob, draws: Draws) -> Iterator[Steps]:
    with _join(job) as world:
        matrix = world.matrix(job.rows, COLS, name="matrix")
        keyed = world.keys(COLS, name="keyed", capacity=job.rows)
        if job.rank == 0:
            keyed.add(torch.zeros(job.rows, COLS), torch.arange(job.rows))
        array = world.array(ARRAY_ELEMENTS, name="array")
        yield Steps(
            makers={
                "get": draws.getting(lambda rows, out: matrix.get(rows, out=out)),
                "add": draws.adding(lambda rows, delta: matrix.add(delta, rows)),
                "keys get": draws.getting(lambda rows, out: keyed.get(rows, out=out)),
                "keys add": draws.adding(lambda rows, delta: keyed.add(delta, rows)),
                "flood": draws.adding(lambda rows, delta: matrix.add(delta, rows)),
                "array get": draws.of_array(lambda out: array.get(out=out)),
                "array add": draws.of_array(array.add),
            },
            meet=world.barrier,
        )


@contextmanager
def _torch(job: TablesJob, draws: Draws) -> Iterator[Steps]:
    matrix = torch.zeros(job.rows, COLS)
    array = torch.zeros(ARRAY_ELEMENTS)

    def add(ids: Tensor, delta: Tensor) -> None:
        matrix.index_add_(0, ids, delta)

    def get(ids: Tensor, out: Tensor) -> None:
        torch.index_select(matrix, 0, ids, out=out)

    with _join(job) as world:  # to begin and end a flood together; nothing is shared
        yield Steps(
            makers={
                "get": draws.getting(get),
                "add": draws.adding(add),
                "flood": draws.adding(add),
                "array get": draws.of_array(lambda out: out.copy_(array)),
                "array add": draws.of_array(array.add_),
            },
            meet=world.barrier,
        )


@contextmanager
def _rpc(job: TablesJob, draws: Draws) -> Iterator[Steps]:
    with rpc_matrix(job.rank, 2, job.rows, job.folder) as access:
        makers = {"get": draws.getting(access.get), "add": draws.adding(access.add)}
        yield Steps(makers=makers if job.rank < 2 else {})


@contextmanager
def _ray(job: TablesJob, draws: Draws) -> Iterator[Steps]:
    with ray_matrix(job.rank, job.rows, job.folder) as access:
        makers = {"get": draws.getting(access.get), "add": draws.adding(access.add)}
        yield Steps(makers=makers)


# --- a snapshot -----------------------------------------------------------------------------------


@contextmanager
def _snapshot(job: TablesJob, draws: Draws) -> Iterator[Steps]:
    """``job.rows`` are those of the table; worker 1 trains on while worker 0 writes."""
    folder = Path(job.folder)
    first = torch.rand(job.rows, COLS) if job.rank == 0 else None
    data = memoryview(b"") if first is None else first.view(torch.uint8).view(-1).numpy().data

    def write() -> None:
        with open(folder / "raw", "wb", buffering=0) as file:
            for start in range(0, len(data), _PIECE_BYTES):
                file.write(data[start : start + _PIECE_BYTES])
            os.fsync(file.fileno())
        (folder / "raw").unlink()

    with _join(job) as world:
        matrix = world.matrix(job.rows, COLS, name="matrix", init=first)
        yield Steps(
            makers={
                "add": draws.adding(lambda rows, delta: matrix.add(delta, rows)),
                "snapshot": lambda _: lambda: matrix.snapshot(folder / "snapshot"),
                "disk": lambda _: write,
            },
            meet=world.barrier,
            until=folder / "over",
        )


CONTESTANTS: dict[str, Callable[[TablesJob, Draws], AbstractContextManager[Steps]]] = {
    "phalanx": _phalanx,
    "torch": _torch,
    "rpc": _rpc,
    "ray": _ray,
    "snapshot": _snapshot,
}


def commands_of(job: TablesJob) -> list[Command]:
    """Return the command lines that run ``job``."""
    ranks = range(3 if job.contestant == "rpc" else 2)
    return [command_of(replace(job, rank=rank)) for rank in ranks]
