"""What the contestants of ``make bench-tables`` are asked to do, and a turn of a worker.

A task is named by its place in `TASKS`, which both sides have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.turns import Step, seconds_of
from phalanx.clock import now_s

COLS = 64
SIZES = (10, 1_000, 100_000)
ARRAY_ELEMENTS = 10_000_000  # of float32: 40 MB

_DROPPED = 2  # operations at the beginning of a turn, which find cold caches
_FEWEST = 3  # operations that count in a turn
_MOST = 200  # that are told of a turn; picked evenly
_FRESH_LISTS = 64  # round and round
_FRESH_ROWS = 400_000  # that all lists together have, at most
_FLOOD_ROWS_PER_S = 4_000_000  # of each worker, by the length of a turn
_TRAINING_ROWS = 1_000


@dataclass(frozen=True, kw_only=True)
class TableTask:
    """One thing that is timed, as worker 0 sees it.

    Args:
        kind: "get" or "add": of rows of the matrix. "keys get" or "keys add": the same of a table
            that finds them by key. "array get" or "array add": of all of the
            array. "flood": equally many adds by each worker at work, to random rows,
            from the beginning of the first to the end of the last. "snapshot": of a table, to disk.
            "disk": the same bytes, written and synced.
        rows: How many at a time; 0 for the array and the disk.
        both: Whether the other worker works meanwhile; else it has joined and is idle.
        fresh: Whether the random rows are others each time; else the same, so that a thousand of
            them are in the cache.
    """

    kind: str
    rows: int = 0
    both: bool = False
    fresh: bool = False


TASKS_OF_MEMORY = (
    *(
        TableTask(kind=kind, rows=rows, both=both, fresh=fresh)
        for both, fresh in ((False, False), (True, False), (False, True))
        for rows in SIZES
        for kind in ("get", "add")
    ),
    *(TableTask(kind=kind, rows=rows) for rows in SIZES for kind in ("keys get", "keys add")),
    TableTask(kind="array get"),
    TableTask(kind="array add"),
    *(
        TableTask(kind="flood", rows=rows, both=both, fresh=True)
        for rows in SIZES[1:]
        for both in (False, True)
    ),
)
TASKS_OF_DISK = (TableTask(kind="snapshot", both=True), TableTask(kind="disk", both=True))
TASKS = (*TASKS_OF_MEMORY, *TASKS_OF_DISK)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a contestant can do.

    Args:
        makers: By kind of task, how to make what is then done over and over.
        meet: Waits until both workers have come.
        until: A file by which worker 0 tells the other one that it is done.
    """

    makers: Mapping[str, Callable[[TableTask], Step]]
    meet: Callable[[], object] = lambda: None
    until: Path = Path()


class Draws:
    """What a worker adds, and where: random rows, the same in every contestant.

    Args:
        rank: The worker.
        num_rows: How many rows there are to choose from.
        first_row: The first of them.
    """

    def __init__(self, *, rank: int, num_rows: int, first_row: int = 0) -> None:
        self._rank = rank
        self._num_rows = num_rows
        self._first_row = first_row

    def _lists(self, task: TableTask) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1000 * task.rows + self._rank)
        most = _FRESH_LISTS if task.fresh else 1
        num_lists = max(1 + task.fresh, min(most, _FRESH_ROWS // task.rows))
        lists = torch.randint(self._num_rows, (num_lists, task.rows), generator=generator)
        lists += self._first_row
        return itertools.cycle(lists.unbind())

    def getting(self, get: Callable[[Tensor, Tensor], object]) -> Callable[[TableTask], Step]:
        """Make a step that gets rows, of a function of the rows and of where they may go."""

        def make(task: TableTask) -> Step:
            lists, out = self._lists(task), torch.empty(task.rows, COLS)
            return lambda: get(next(lists), out)

        return make

    def adding(self, add: Callable[[Tensor, Tensor], object]) -> Callable[[TableTask], Step]:
        """Make a step that adds to rows, of a function of the rows and of the delta."""

        def make(task: TableTask) -> Step:
            lists, delta = self._lists(task), torch.full((task.rows, COLS), 1e-3)
            return lambda: add(next(lists), delta)

        return make

    @staticmethod
    def of_array(work: Callable[[Tensor], object]) -> Callable[[TableTask], Step]:
        """Make a step that gets the array into a tensor, or adds that to it."""

        def make(_: TableTask) -> Step:
            whole = torch.full((ARRAY_ELEMENTS,), 1e-3)
            return lambda: work(whole)

        return make


def take_turn(task: TableTask, rank: int, steps: Steps, turn_s: float) -> list[float]:
    """Work for a turn, and return the seconds of what counts.

    Of a flood they are seconds per row of all workers.
    """
    make = steps.makers.get(task.kind)
    if make is None:
        return []
    if task.kind in ("snapshot", "disk"):
        return _write(task, rank, steps)
    at_work = rank == 0 or task.both
    if task.kind == "flood":
        return _flood(task, at_work, make(task), steps.meet, turn_s)
    return repeat(make(task), turn_s) if at_work else []


def repeat(step: Step, turn_s: float) -> list[float]:
    """Make a step over and over; return the seconds of those that count."""
    seconds: list[float] = []
    until_s = now_s() + turn_s
    while now_s() < until_s or len(seconds) < _DROPPED + _FEWEST:
        seconds.append(seconds_of(step))
    kept = seconds[_DROPPED:]
    return kept[:: -(-len(kept) // _MOST)]


def _flood(
    task: TableTask, at_work: bool, step: Step, meet: Callable[[], object], turn_s: float
) -> list[float]:
    num_adds = max(1, int(_FLOOD_ROWS_PER_S * turn_s) // task.rows)
    step()
    meet()
    started_s = now_s()
    for _ in range(num_adds if at_work else 0):
        step()
    meet()
    num_workers = 2 if task.both else 1
    return [(now_s() - started_s) / (num_adds * task.rows * num_workers)]


def _write(task: TableTask, rank: int, steps: Steps) -> list[float]:
    """Let worker 0 write once, and the other one train until it is done."""
    steps.until.unlink(missing_ok=True)
    steps.meet()
    if rank > 0:
        train = steps.makers["add"](TableTask(kind="add", rows=_TRAINING_ROWS, fresh=True))
        while not steps.until.exists():
            train()
        return []
    step = steps.makers[task.kind](task)
    try:
        return [seconds_of(step)]
    finally:
        steps.until.touch()
