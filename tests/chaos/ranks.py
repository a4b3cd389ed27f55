"""Ranks of one group that a test may kill: survivors go on into the next group."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx  # noqa: F401
from phalanx.distributed.network import ErrorStore
from phalanx.ipc import inject, wait_until
from tests.chaos.calls import Call
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
        after_s: How much later than that.
        length: Elements of each tensor.
        timeout_s: The group's, from when the victim is ready.
        tells: Whether survivors tell other hosts of an error; else a mutation.
        hosts: The host that each rank plays to be on; nothing for one host.
    """

    kind: str
    victim: int
    point: str
    deed: str = "kill"
    passing: int = 1
    after_s: float = 0.0
    length: int = LENGTH
    timeout_s: float = 60.0
    tells: bool = True
    hosts: str = ""


@dataclass(frozen=True)
class RunResult:
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


CALLS = 4
_CLEAN_UP_S = 5.0


def serve(parent: Parent) -> None:
    """Take part in one group after another, until told None."""
    torch.set_num_threads(1)
    # On a busy machine a troop has nothing to do for minutes, while others go through their cases.
    while (order := parent.hear(deadline_s=None)) is not None:
        rank, store, case = order
        before = held()
        report = _take_part(parent, rank, store, case)
        inject(None)
        gc.collect()
        # Threads of gloo's may still close some.
        wait_until(lambda before=before: held() <= before, _CLEAN_UP_S)
        parent.tell(RunResult(**report, left_over=sorted(held() - before)))


def held() -> set[str]:
    """What of a group's kind this process has open or mapped."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "phalanx" in target or target.startswith("pipe:"):
                found.add(f"{fd} -> {target}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    return found | {line.split()[0] for line in maps if "memfd:phalanx" in line}


def join_group(store: str, rank: int, size: int, timeout_s: float) -> None:
    """Make the default group of this process, of our backend."""
    dist.init_process_group(
        "phalanx",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def told(caught: BaseException | None) -> dict[str, Any]:
    """Return what a report holds of an error."""
    return {
        "error": type(caught).__name__,
        "message": str(caught),
        "rank": getattr(caught, "rank", None),
        "raised_at_s": time.monotonic(),
    }


def _take_part(parent: Parent, rank: int, store: str, case: Case) -> dict[str, Any]:
    os.environ["PHALANX_HOST"] = case.hosts[rank] if case.hosts else ""
    join_group(store, rank, SIZE, DEADLINE_S)
    calls = [Call(case.kind, number, case.length, SIZE) for number in range(1 + CALLS)]
    num_right = 0
    try:
        assert calls.pop(0).is_right(rank)
        dist.barrier()
        dist.group.WORLD.setTimeout(datetime.timedelta(seconds=case.timeout_s))
        if rank == case.victim:
            _prepare(parent, case)
        elif not case.tells:
            ErrorStore.write = lambda self, error: None  # type: ignore[method-assign]
        for call in calls:
            num_right += call.is_right(rank)
        report = told(None)
    except Exception as exc:
        report = told(exc)
    finally:
        dist.destroy_process_group()
    return {**report, "num_right": num_right}


def _prepare(parent: Parent, case: Case) -> None:
    left = case.passing

    def fault(point: str, worker: int) -> None:
        nonlocal left
        if point != case.point:
            return
        left -= 1
        if left == 0:
            parent.tell(time.monotonic())
            with_signal = signal.SIGKILL if case.deed == "kill" else signal.SIGSTOP
            if case.after_s:
                threading.Timer(case.after_s, os.kill, (os.getpid(), with_signal)).start()
            else:
                os.kill(os.getpid(), with_signal)

    inject(fault)


class Troop:
    """Three ranks; whoever was killed is replaced for the next group, whoever was stopped goes on.

    Attributes:
        pids: The processes of the ranks.
    """

    def __init__(self) -> None:
        self._children: list[Child] = [Child(serve) for _ in range(SIZE)]
        self._folder = tempfile.TemporaryDirectory()
        self._num_groups = 0

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def go_through(self, case: Case) -> tuple[float, dict[int, RunResult]]:
        """Make a group, hit the victim; return when, and what the ranks say, by rank.

        Somebody who was stopped is woken once the others have ended, and reports too.
        """
        self._num_groups += 1
        store = str(Path(self._folder.name) / str(self._num_groups))
        for rank, child in enumerate(self._children):
            child.put((rank, store, case))
        victim = self._children[case.victim]
        hit_at_s = victim.get()
        reports = {
            rank: child.get() for rank, child in enumerate(self._children) if rank != case.victim
        }
        if case.deed == "stop":
            os.kill(victim.pid, signal.SIGCONT)
            reports[case.victim] = victim.get()
        else:
            self._replace(case.victim)
        if not case.tells:
            for rank in reports:
                self._replace(rank)
        return hit_at_s, reports

    def _replace(self, rank: int) -> None:
        self._children[rank].end()
        self._children[rank] = Child(serve)

    def __enter__(self) -> Troop:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            child.end()
        self._folder.cleanup()
