"""Many small collectives and many groups, one after the other: nothing grows.

Two ranks of `phalanx` make all-reduces of some numbers, each with a checked result, or make and
destroy groups. Each weighs itself on the way: resident memory, descriptors, mappings and threads.
The first weighing comes after a part of the way, when all that is made once is there.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.chaos.ranks import join_group
from tests.multiprocess.children import DEADLINE_S, Child, Parent

RANKS = 2
LENGTH = 256
WEIGHINGS = 10
PART_S = 300.0  # between two weighings, of which the longest take 20 s on a quiet machine
GROWTH_BYTES = 2 << 20  # of resident memory, from the first weighing to the last: noise of malloc
KEPT_BYTES = {"calls": 0, "groups": 200}  # torch keeps a tag per group: 154 bytes


@dataclass(frozen=True)
class Weight:
    """What a rank holds at a moment.

    Attributes:
        rank: Which.
        done: After how many calls, or groups.
        resident_bytes: Memory.
        descriptors: Open files.
        mappings: Of groups.
        threads: Of the process.
    """

    rank: int
    done: int
    resident_bytes: int
    descriptors: int
    mappings: int
    threads: int

    @classmethod
    def now(cls, rank: int, done: int) -> Weight:
        """Weigh this process."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            rank=rank,
            done=done,
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            descriptors=len(os.listdir("/proc/self/fd")),
            mappings=Path("/proc/self/maps").read_text().count("memfd:phalanx"),
            threads=len(os.listdir("/proc/self/task")),
        )


def _reduce_once(rank: int, number: int) -> None:
    tensor = torch.full((LENGTH,), float(rank + number % 1000))
    dist.all_reduce(tensor)
    assert tensor[0] == tensor[-1] == RANKS * (number % 1000) + 1, f"call {number}: {tensor}"


def _group_once(rank: int, number: int) -> None:
    group = dist.new_group(backend="phalanx")
    tensor = torch.full((LENGTH,), float(rank + number % 1000))
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == tensor[-1] == RANKS * (number % 1000) + 1, f"group {number}: {tensor}"
    dist.destroy_process_group(group)


DEEDS: dict[str, Callable[[int, int], None]] = {"calls": _reduce_once, "groups": _group_once}


def serve(parent: Parent, rank: int, store: str, deed: str, times: int) -> None:
    """Do ``deed`` so often, and tell the weight at the beginning of each part but the first."""
    torch.set_num_threads(1)
    join_group(store, rank, RANKS, DEADLINE_S)
    every = max(1, times // WEIGHINGS)
    for number in range(times):
        DEEDS[deed](rank, number)
        if (number + 1) % every == 0:
            parent.tell(Weight.now(rank, number + 1))
    parent.tell(None)
    dist.destroy_process_group()


def weigh(deed: str, times: int) -> list[Weight]:
    """Let all ranks do ``deed`` so often; return their weights on the way."""
    found: list[Weight] = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [Child(serve, rank, store, deed, times) for rank in range(RANKS)]
        try:
            ended = 0
            while ended < RANKS:
                for rank in ranks:
                    weight = rank.get(PART_S)
                    ended += weight is None
                    if weight is not None:
                        found.append(weight)
        finally:
            for rank in ranks:
                rank.end()
    return found


def growths(deed: str, weights: Sequence[Weight]) -> list[str]:
    """Say what has grown from a rank's first weighing to its last."""
    found = []
    for rank in range(RANKS):
        own = [weight for weight in weights if weight.rank == rank]
        first, last = own[0], own[-1]
        more = last.resident_bytes - first.resident_bytes
        if more > GROWTH_BYTES + KEPT_BYTES[deed] * (last.done - first.done):
            found.append(f"rank {rank} holds {more >> 10} KiB more")
        for what in ("descriptors", "mappings", "threads"):
            before, after = getattr(first, what), getattr(last, what)
            if after > before:
                found.append(f"rank {rank} holds {after} {what}, before {before}")
    return found


@pytest.mark.parametrize(
    ("deed", "times"),
    [
        ("calls", 10_000),
        ("groups", 100),
        pytest.param("calls", 1_000_000, marks=pytest.mark.night),
        pytest.param("groups", 10_000, marks=pytest.mark.night),
    ],
)
def test_nothing_grows(deed: str, times: int) -> None:
    assert growths(deed, weigh(deed, times)) == []
