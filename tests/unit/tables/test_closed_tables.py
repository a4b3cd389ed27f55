"""What a closed world has let go of: everything, at once."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.errors import StateError

DEADLINE_S = 60.0
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


def use_matrix(world: tables.TableGroup) -> tables.Table:
    table = world.matrix(1 << 12, 16, updater="adagrad")
    table.add(torch.ones(1, 16), rows=[3])
    table.get([3])
    return table


def use_rounds(world: tables.TableGroup) -> tables.Table:
    table = world.array(100_000, sync=True, num_shards=3)
    table.add(torch.ones(100_000))
    table.get()
    return table


def use_keys(world: tables.TableGroup) -> tables.Table:
    table = world.keys(8, capacity=16, num_shards=2)
    table.add(torch.ones(500, 8), rows=torch.arange(500))  # grows
    table.get([1, 499, 1 << 40])
    return table


def use_last_read(world: tables.TableGroup) -> tables.Table:
    table = world.matrix(10_000, 4, updater="dc_asgd")
    table.get()
    table.add(torch.ones(10_000, 4))
    world.barrier()
    return table


KINDS = [use_matrix, use_rounds, use_keys, use_last_read]


@pytest.mark.parametrize("use", KINDS)
@pytest.mark.parametrize("run", [None, "closed"])
def test_closing_a_world_frees_its_tables_though_handles_are_kept(use, run):
    run = run and f"{run}-{os.getpid()}"
    before = held()
    with tables.join(run=run, num_workers=1) as world:
        table = use(world)
        assert held()[0] - before[0] > 4 * PAGE_BYTES
    assert held()[0] - before[0] <= PAGE_BYTES
    with pytest.raises(StateError, match="its group is closed"):
        table.get([1])
    assert table.stats().adds == 1
    assert table.stats().undone == 0
    del table, world
    assert held() == before


def test_what_was_read_stays_when_the_world_is_closed():
    before = held()
    with tables.join() as world:
        table = world.matrix(1 << 10, 4, init=2.0)
        rows = table.get()
        views = table.get([5, 7])
    del table, world
    assert held() == before
    assert rows.eq(2.0).all()
    assert views.eq(2.0).all()


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


def test_a_worker_that_two_threads_close_counts_out_once():
    with tables.join() as world, world.thread_worker() as other:
        _, table = (each.array(2, name="t") for each in (world, other))
        together = threading.Barrier(2)

        def close() -> None:
            together.wait(DEADLINE_S)
            world.close()

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        world.close()
        table.add([1.0, 1.0])
        assert table.get().tolist() == [1.0, 1.0]


def test_tables_without_a_name_that_threads_open_are_different_ones():
    sys.setswitchinterval(1e-5)
    try:
        with tables.join() as world, ThreadPoolExecutor(4) as pool:
            for _ in range(20):
                opened = list(pool.map(lambda _: world.array(2), range(4)))
                assert len({table.name for table in opened}) == 4
    finally:
        sys.setswitchinterval(0.005)


def test_a_call_that_comes_too_late_is_told_that_the_world_is_closed():
    with tables.join() as world:
        storage = world.matrix(8, 2, name="late")._storage
    with pytest.raises(StateError, match="'late' must belong to an open group"):
        storage.read(None, torch.empty(8, 2), 0, 1.0)  # its handle had looked
