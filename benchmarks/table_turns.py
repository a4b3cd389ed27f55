"""One turn of a contestant of ``make bench-tables``: work for a while, and time it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arena import Step
from benchmarks.table_tasks import ARRAY_ELEMENTS, COLS, TableTask
from phalanx.clock import now_s

__all__ = ["Draws", "Steps", "take_turn"]

_DROPPED = 2  # operations at the beginning of a turn, which find cold caches
_FEWEST = 3  # operations that count in a turn
_MOST = 200  # that are told of a turn; picked evenly
_FRESH_LISTS = 64  # round and round
_FRESH_ROWS = 400_000  # that all lists together have, at most
_FLOOD_ROWS_PER_S = 4_000_000  # of each worker, by the length of a turn
_TRAINING_ROWS = 1_000


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
    """What a worker adds, and where: random rows, the same in every contestant."""

    def __init__(self, *, rank: int, num_rows: int) -> None:
        self._rank = rank
        self._num_rows = num_rows

    def _lists(self, task: TableTask) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1000 * task.rows + self._rank)
        most = _FRESH_LISTS if task.fresh else 1
        num_lists = max(1 + task.fresh, min(most, _FRESH_ROWS // task.rows))
        lists = torch.randint(self._num_rows, (num_lists, task.rows), generator=generator)
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
    return _repeat(make(task), turn_s) if at_work else []


def _repeat(step: Step, turn_s: float) -> list[float]:
    seconds: list[float] = []
    until_s = now_s() + turn_s
    while now_s() < until_s or len(seconds) < _DROPPED + _FEWEST:
        started_s = now_s()
        step()
        seconds.append(now_s() - started_s)
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
    started_s = now_s()
    try:
        step()
        return [now_s() - started_s]
    finally:
        steps.until.touch()
