"""``python -m benchmarks tables``: tables beside torch RPC and torch's own kernels.

    phalanx   2 workers                tables in memory that both map
    torch     2 workers                private memory, torch's kernels: nothing is shared or saved
    rpc       2 workers, a server      torch.distributed.rpc; the server owns the matrix

Each process has one thread. All use the same random rows each time, so what is compared is what
each system adds, and not how fast memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.contest import Turn, commands_of, seconds_of, serve
from benchmarks.report import OUT, Names, Out, Rounds, Row, Run, Sheet, read_names
from benchmarks.step import use_loopback
from phalanx import tables as phalanx_tables
from phalanx.clock import now_s

ROWS, COLS = 1_000_000, 64
PATIENCE_S = 120.0
SIZES = (10, 1_000, 100_000)
_ARRAY_ELEMENTS = 10_000_000  # of float32: 40 MB
_TURN_S = 0.1
_DROPPED, _FEWEST, _MOST = 2, 3, 200  # operations of a turn
_ROWS_AT_ONCE = 400_000  # that each worker adds, while several do


class Access(NamedTuple):
    """What a worker does with rows.

    Attributes:
        get: Takes the rows, and the tensor that they may go to.
        add: Takes the rows, and the delta; None where nothing can be added.
    """

    get: Callable[[Tensor, Tensor], object]
    add: Callable[[Tensor, Tensor], object] | None = None


@dataclass(frozen=True)
class Task:
    """Something that is timed.

    Args:
        kind: "get" or "add".
        rows: How many; all of an array.
        of: Which rows: "matrix", "keys", "array", or "local" ones of a matrix on several hosts.
        workers: How many add at once, equally often; 0: the first worker alone, over and over.
    """

    kind: str
    rows: int
    of: str = "matrix"
    workers: int = 0

    def __str__(self) -> str:
        at_once = f", {self.workers} at once" if self.workers else ""
        return f"{self.kind} {self.rows:,} of {self.of}{at_once}"


TASKS = (
    *(
        Task(kind, rows, of)
        for of in ("matrix", "keys")
        for rows in SIZES
        for kind in ("get", "add")
    ),
    *(Task(kind, _ARRAY_ELEMENTS, "array") for kind in ("get", "add")),
)


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """One process of a contestant; a question is the place of a task in `tasks`.

    Args:
        workers: Processes that get and add; a server comes behind them.
    """

    contestant: str
    workers: int = 2
    rank: int = 0

    def run(self) -> None:
        """Be the process."""
        torch.set_num_threads(1)
        serve(self._open_turn)

    def _open_turn(self, stack: ExitStack) -> Turn:
        access = self.open(stack)
        meet = self.join(stack, "meeting", self.num_processes).barrier
        return lambda number: self._take_turn(self.tasks[number], access, meet)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks."""
        return TASKS

    @property
    def num_processes(self) -> int:
        """How many processes the contestant has."""
        return self.workers + (self.contestant == "rpc")

    def open(self, stack: ExitStack) -> Mapping[str, Access]:
        """Set up, and return what can be done with which rows."""
        return CONTESTANTS[self.contestant](self, stack)

    def rows_of(self, of: str) -> range:  # noqa: ARG002 -- for jobs on several hosts
        """Return the rows that are drawn from."""
        return range(ROWS)

    def join(self, stack: ExitStack, what: str, num_workers: int) -> phalanx_tables.TableGroup:
        """Join a group of tables on this host until the stack ends."""
        name = f"bench-{Path.cwd().parent.name}-{self.contestant}-{what}"
        group = phalanx_tables.join(name, num_workers=num_workers, timeout_s=PATIENCE_S)
        return stack.enter_context(group)

    def _take_turn(
        self, task: Task, access: Mapping[str, Access], meet: Callable[[], object]
    ) -> list[float]:
        at_work = self.rank < max(1, task.workers) and task.of in access
        step = self._step(task, access[task.of]) if at_work else None
        if task.workers:
            return _add_at_once(task, step, meet)
        return [] if step is None else _repeat(step)

    def _step(self, task: Task, access: Access) -> Callable[[], object] | None:
        work = access.get if task.kind == "get" else access.add
        if work is None:
            return None
        if task.of == "array":
            rows, tensor = torch.empty(0), torch.full((task.rows,), 1e-3)
        else:
            rows, tensor = self._draw(task), torch.full((task.rows, COLS), 1e-3)
        return lambda: work(rows, tensor)

    def _draw(self, task: Task) -> Tensor:
        span = self.rows_of(task.of)
        generator = torch.Generator().manual_seed(1000 * task.rows + self.rank)
        return torch.randint(span.start, span.stop, (task.rows,), generator=generator)


def _repeat(step: Callable[[], object]) -> list[float]:
    """Make a step over and over; return the seconds of those that count, evenly picked."""
    seconds: list[float] = []
    until_s = now_s() + _TURN_S
    while now_s() < until_s or len(seconds) < _DROPPED + _FEWEST:
        seconds.append(seconds_of(step))
    kept = seconds[_DROPPED:]
    return kept[:: -(-len(kept) // _MOST)]


def _add_at_once(
    task: Task, step: Callable[[], object] | None, meet: Callable[[], object]
) -> list[float]:
    """Add equally often in each worker, from a barrier to a barrier; return seconds per add."""
    number = min(_MOST, _ROWS_AT_ONCE // task.rows)
    if step is not None:
        step()
    meet()
    started_s = now_s()
    for _ in range(number if step is not None else 0):
        step()  # type: ignore[misc]
    meet()
    return [(now_s() - started_s) / (number * task.workers)]


# -- contestants -------------------------------------------------------------------------------


def of_table(table: phalanx_tables.Table) -> Access:
    """Return what a worker does with a table's rows."""
    return Access(
        get=lambda rows, out: table.get(rows, out=out),
        add=lambda rows, delta: table.add(delta, rows),
    )


def _phalanx(job: TableJob, stack: ExitStack) -> Mapping[str, Access]:
    group = job.join(stack, "tables", job.workers)
    matrix = group.matrix(ROWS, COLS, name="matrix")
    keyed = group.keys(COLS, name="keyed")
    if job.rank == 0:
        keyed.add(torch.zeros(ROWS, COLS), torch.arange(ROWS))
    array = group.array(_ARRAY_ELEMENTS, name="array")
    of_array = Access(lambda _, out: array.get(out=out), lambda _, delta: array.add(delta))
    return {"matrix": of_table(matrix), "keys": of_table(keyed), "array": of_array}


def _torch(_: TableJob, __: ExitStack) -> Mapping[str, Access]:
    matrix, array = torch.zeros(ROWS, COLS), torch.zeros(_ARRAY_ELEMENTS)
    of_matrix = Access(
        get=lambda rows, out: torch.index_select(matrix, 0, rows, out=out),
        add=lambda rows, delta: matrix.index_add_(0, rows, delta),
    )
    of_array = Access(lambda _, out: out.copy_(array), lambda _, delta: array.add_(delta))
    return {"matrix": of_matrix, "array": of_array}


_owned = torch.empty(0, COLS)  # the matrix of torch RPC's server


def _rpc_get(rows: Tensor) -> Tensor:
    return _owned.index_select(0, rows)


def _rpc_add(rows: Tensor, delta: Tensor) -> None:
    _owned.index_add_(0, rows, delta)


def torch_rpc(job: TableJob, stack: ExitStack) -> Mapping[str, Access]:
    """Use torch RPC until the stack ends; the last process is the server."""
    from torch.distributed import rpc  # slow, and nobody else needs it

    global _owned
    use_loopback("TP", "GLOO")
    if job.rank == job.workers:
        _owned = torch.zeros(ROWS, COLS)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{Path('rpc').absolute()}", rpc_timeout=PATIENCE_S
    )
    size, server = job.workers + 1, f"rank{job.workers}"
    rpc.init_rpc(f"rank{job.rank}", rank=job.rank, world_size=size, rpc_backend_options=options)
    stack.callback(rpc.shutdown, graceful=False)
    access = Access(
        get=lambda rows, _: rpc.rpc_sync(server, _rpc_get, (rows,)),
        add=lambda rows, delta: rpc.rpc_sync(server, _rpc_add, (rows, delta)),
    )
    return {"matrix": access}


CONTESTANTS: dict[str, Callable[[TableJob, ExitStack], Mapping[str, Access]]] = {
    "phalanx": _phalanx,
    "torch": _torch,
    "rpc": torch_rpc,
}


# -- the contest -------------------------------------------------------------------------------


def tables(
    contestants: Names = "phalanx,torch,rpc",
    rounds: Rounds = 8,
    out: Out = OUT,
) -> None:
    """Time get and add of rows: tables beside torch RPC and torch's own kernels."""
    run = Run("tables", out)
    names = read_names("contestants", contestants, CONTESTANTS)
    jobs = [TableJob(contestant=name) for name in names]
    commands = {job.contestant: commands_of(job, job.num_processes) for job in jobs}
    questions = {task: number for number, task in enumerate(TASKS)}
    outcome = run.compete("2 workers", commands, questions, rounds)
    title = f"{ROWS:,} × {COLS} float32, 2 workers: median µs"
    run.sheets.append(latencies(title, names, {task: outcome.medians(task) for task in TASKS}))
    run.publish()


def latencies(title: str, names: list[str], medians: Mapping[Task, Mapping[str, float]]) -> Sheet:
    """Return the microseconds of each task of one worker."""
    found: list[Row] = []
    for task, by_name in medians.items():
        seconds = (by_name.get(name) for name in names)
        found.append((str(task), *(each and 1e6 * each for each in seconds)))
    return Sheet(title, names, found)
