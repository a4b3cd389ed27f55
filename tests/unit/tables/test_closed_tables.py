"""What a closed world has let go of: everything, at once."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.errors import StateError

PAGE_BYTES = 32 << 10  # of workers and barriers; a closed world still tells who is here


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    """Let nothing but the last reference free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> tuple[int, int]:
    """Return how many bytes of our regions this process has mapped, and how many descriptors."""
    nbytes = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:phalanx" in line or "/dev/shm/phalanx" in line:
            span = line.split()[0]
            start, stop = (int(end, 16) for end in span.split("-"))
            nbytes += stop - start
    return nbytes, len(os.listdir("/proc/self/fd"))


KINDS: list[Callable[[tables.TableGroup], tables.Table]] = [
    lambda world: world.matrix(1 << 12, 16, updater="adagrad"),
    lambda world: world.matrix(1 << 12, 16, sync=True),
    lambda world: world.keys(16),  # grows
]


@pytest.mark.parametrize("make", KINDS, ids=["updater", "rounds", "keys"])
@pytest.mark.parametrize("run", [None, "closed"])
def test_closing_a_world_frees_its_tables_though_handles_are_kept(make, run):
    run = run and f"{run}-{os.getpid()}"
    before = held()
    with tables.join(run=run, num_workers=1) as world:
        table, rows = make(world), torch.arange(1 << 12)
        table.add(torch.ones(1 << 12, 16), rows=rows)
        table.get(rows)
        table.add(torch.ones(1 << 12, 16), rows=rows)
        assert held()[0] - before[0] > 4 * PAGE_BYTES
    assert held()[0] - before[0] <= PAGE_BYTES
    with pytest.raises(StateError, match="its group is closed"):
        table.get([1])
    del table, world
    assert held() == before


def test_tables_go_with_the_last_worker_of_the_process():
    before = held()
    with tables.join() as world:
        other = world.thread_worker()
        world.matrix(10_000, 4)
        table = other.matrix(10_000, 4)
        world.close()
        table.add(torch.ones(10_000, 4))
        assert table.get().eq(1).all()
        other.close()
        assert held()[0] - before[0] <= PAGE_BYTES
