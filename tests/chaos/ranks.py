"""Ranks of one group that a test may kill: survivors go on into the next group."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx  # noqa: F401
from phalanx.memory import Waiting, plant
from tests.multiprocess.children import DEADLINE_S, Child, Parent

SIZE = 3
LENGTH = 300_001  # more than one piece, and no multiple of anything


@dataclass(frozen=True)
class Case:
    """What one group goes through.

    Attributes:
        kind: Which operation, by its name in `KINDS`.
        victim: Which rank is hit.
        point: Where.
        deed: ``kill`` or ``stop``.
        passing: At the how-manieth passing.
        timeout_s: The group's.
        sabotage: The bug that is planted in the survivors, by its name in `BUGS`.
    """

    kind: str
    victim: int
    point: str
    deed: str = "kill"
    passing: int = 1
    timeout_s: float = 60.0
    sabotage: str = ""


@dataclass(frozen=True)
class Report:
    """How a survivor fared.

    Attributes:
        error: The class of what its call raised.
        message: Its text.
        rank: Whom the error names.
        raised_at_s: When, on the clock that all processes share.
        num_right: How many calls gave the right result before.
        left_over: Descriptors and mappings that the group has left.
    """

    error: str
    message: str
    rank: int | None
    raised_at_s: float
    num_right: int
    left_over: list[str]


def _numbers(rank: int) -> Tensor:
    return torch.arange(LENGTH, dtype=torch.float32) + rank


def _all_reduce(rank: int) -> bool:
    tensor = _numbers(rank)
    dist.all_reduce(tensor)
    return torch.equal(tensor, sum((_numbers(r) for r in range(1, SIZE)), _numbers(0)))


def _small_all_reduce(rank: int) -> bool:
    tensor = torch.tensor(2**rank)
    dist.all_reduce(tensor)
    return tensor.item() == 2**SIZE - 1


def _reduce(rank: int) -> bool:
    tensor = _numbers(rank)
    dist.reduce(tensor, 1)
    everybody = sum((_numbers(r) for r in range(1, SIZE)), _numbers(0))
    return torch.equal(tensor, everybody if rank == 1 else _numbers(rank))


def _broadcast(rank: int) -> bool:
    tensor = _numbers(rank)
    dist.broadcast(tensor, 1)
    return torch.equal(tensor, _numbers(1))


def _all_gather(rank: int) -> bool:
    parts = [torch.empty(LENGTH) for _ in range(SIZE)]
    dist.all_gather(parts, _numbers(rank))
    return all(torch.equal(part, _numbers(r)) for r, part in enumerate(parts))


def _gather(rank: int) -> bool:
    parts = [torch.empty(LENGTH) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(_numbers(rank), parts, 1)
    return all(torch.equal(part, _numbers(r)) for r, part in enumerate(parts or []))


def _scatter(rank: int) -> bool:
    result = torch.empty(LENGTH)
    dist.scatter(result, [_numbers(r) for r in range(SIZE)] if rank == 1 else None, 1)
    return torch.equal(result, _numbers(rank))


def _reduce_scatter(rank: int) -> bool:
    result = torch.empty(LENGTH)
    dist.reduce_scatter(result, [_numbers(rank + r) for r in range(SIZE)])
    return torch.equal(result, sum((_numbers(rank + r) for r in range(1, SIZE)), _numbers(rank)))


def _all_to_all(rank: int) -> bool:
    results = [torch.empty(LENGTH) for _ in range(SIZE)]
    dist.all_to_all(results, [_numbers(10 * rank + r) for r in range(SIZE)])
    return all(torch.equal(part, _numbers(10 * r + rank)) for r, part in enumerate(results))


def _barrier(rank: int) -> bool:
    dist.barrier()
    return True


KINDS: dict[str, Callable[[int], bool]] = {
    "all_reduce": _all_reduce,
    "small all_reduce": _small_all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


@contextlib.contextmanager
def _deaths_unseen() -> Iterator[None]:
    from phalanx.world.board import Board

    alive = Board.alive
    Board.alive = lambda self, rank: True
    try:
        yield
    finally:
        Board.alive = alive


@contextlib.contextmanager
def _marks_unread() -> Iterator[None]:
    """Nobody waits for anybody: results are made of whatever lies in the slots."""
    from phalanx.world.arena import Arena
    from phalanx.world.board import Board

    mark_of, check = Board.mark_of, Arena._check
    Board.mark_of = lambda self, rank: 1 << 60
    Arena._check = lambda self, ranks: None
    try:
        yield
    finally:
        Board.mark_of, Arena._check = mark_of, check


BUGS = {"": contextlib.nullcontext, "deaths unseen": _deaths_unseen, "marks unread": _marks_unread}
CALLS = 4


def serve(parent: Parent) -> None:
    """Take part in one group after another, until told None."""
    torch.set_num_threads(1)
    while (order := parent.hear()) is not None:
        rank, store, case = order
        before = _held()
        report = _take_part(parent, rank, store, case)
        gc.collect()
        parent.tell(Report(**report, left_over=sorted(_held() - before)))


def _held() -> set[str]:
    """What of ours this process has open or mapped."""
    places = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    held = {str(place) for place in places if place.exists() and "phalanx" in os.readlink(place)}
    maps = Path("/proc/self/maps").read_text().splitlines()
    return held | {line.split()[0] for line in maps if "memfd:phalanx" in line}


def _take_part(parent: Parent, rank: int, store: str, case: Case) -> dict[str, Any]:
    dist.init_process_group(
        "phalanx",
        store=dist.FileStore(store, SIZE),
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=case.timeout_s),
    )
    num_right = 0
    call = KINDS[case.kind]
    try:
        assert call(rank)
        dist.barrier()
        if rank == case.victim:
            _prepare(parent, case)
        elif case.sabotage:
            _await_death(case.victim)
        with BUGS["" if rank == case.victim else case.sabotage]():
            for _ in range(CALLS):
                num_right += call(rank)
        caught: BaseException | None = None
    except Exception as exc:
        caught = exc
    finally:
        at_s = time.monotonic()
        dist.destroy_process_group()
    return {
        "error": type(caught).__name__,
        "message": str(caught),
        "rank": getattr(caught, "rank", None),
        "raised_at_s": at_s,
        "num_right": num_right,
    }


def _await_death(victim: int) -> None:
    waiting = Waiting(DEADLINE_S)
    while dist.group.WORLD._arena.board.alive(victim):
        assert not waiting.over()
        waiting.rest()


def _prepare(parent: Parent, case: Case) -> None:
    left = case.passing

    def fault(point: str, worker: int) -> None:
        nonlocal left
        if point != case.point:
            return
        left -= 1
        if left == 0:
            parent.tell(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL if case.deed == "kill" else signal.SIGSTOP)

    plant(fault)


class Troop:
    """Three ranks; whoever was hit is replaced for the next group."""

    def __init__(self) -> None:
        self._children: list[Child] = [Child(serve) for _ in range(SIZE)]
        self._folder = tempfile.TemporaryDirectory()
        self._num_groups = 0

    def go_through(self, case: Case) -> tuple[float, dict[int, Report]]:
        """Make a group, hit the victim; return when, and what the others say, by rank."""
        self._num_groups += 1
        store = str(Path(self._folder.name) / str(self._num_groups))
        for rank, child in enumerate(self._children):
            child.put((rank, store, case))
        victim = self._children[case.victim]
        hit_at_s = victim.get()
        reports = {
            rank: child.get() for rank, child in enumerate(self._children) if rank != case.victim
        }
        victim.end()
        self._children[case.victim] = Child(serve)
        return hit_at_s, reports

    def __enter__(self) -> Troop:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            child.end()
        self._folder.cleanup()
