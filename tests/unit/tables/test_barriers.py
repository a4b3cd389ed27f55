"""Barriers by name: what they count, and that names cost nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx import PeerTimeout, tables

pytestmark = pytest.mark.promise("every-wait-ends")


def name_of_run(request: pytest.FixtureRequest) -> str:
    return f"barriers-{os.getpid()}-{abs(hash(request.node.name))}"


@pytest.mark.parametrize("shared", [False, True])
def test_a_name_for_every_epoch_leaves_no_descriptor_and_no_file(request, shared):
    """Each name once had a region of its own, and a process may have a thousand descriptors."""
    with tables.join(name_of_run(request) if shared else None) as world:
        world.barrier("first")
        folder = world._context.regions.directory.path if shared else os.devnull
        before = len(os.listdir("/proc/self/fd")), os.path.isdir(folder) and os.listdir(folder)
        assert [world.barrier(f"epoch {epoch}") for epoch in range(30)] == [1] * 30
        after = len(os.listdir("/proc/self/fd")), os.path.isdir(folder) and os.listdir(folder)
        assert after == before


def test_rounds_are_counted_by_name_and_those_who_come_later_count_on(request):
    run = name_of_run(request)
    with tables.join(run) as world, ThreadPoolExecutor(1) as thread:
        assert [world.barrier(name) for name in ("a", "b", "a")] == [1, 1, 2]
        with tables.join(run) as other:  # by itself, as another process would

            def go() -> list[int]:
                return [other.barrier(name) for name in ("b", "a", "new")]

            theirs = thread.submit(go)
            assert [world.barrier(name) for name in ("b", "a", "new")] == [2, 3, 1]
            assert theirs.result(10) == [2, 3, 1]
        assert world.barrier("new") == 2


def test_who_gave_a_barrier_up_is_not_named_in_place_of_who_stayed_away(request):
    with (
        tables.join(name_of_run(request), num_workers=3, timeout_s=0.05) as world,
        world.thread_worker() as second,
        world.thread_worker() as third,
    ):
        with pytest.raises(PeerTimeout, match="Workers 1–2 of 3 did not come") as raised:
            world.barrier("end")
        assert raised.value.rank == 1
        with pytest.raises(PeerTimeout, match=r"Worker 2 of 3 .*; workers 0–1 did") as raised:
            second.barrier("end")
        assert raised.value.rank == 2
        with pytest.raises(PeerTimeout, match="They had come before, and given up") as raised:
            third.barrier("end")
        assert raised.value.rank == 0
