"""Barriers: what they count, and whom they name."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx import PeerTimeout, tables

pytestmark = pytest.mark.promise("every-wait-ends")


def name_of_run(request: pytest.FixtureRequest) -> str:
    return f"barriers-{os.getpid()}-{abs(hash(request.node.name))}"


def test_barriers_are_counted_and_those_who_come_later_count_on(request):
    run = name_of_run(request)
    with tables.join(run) as world, ThreadPoolExecutor(1) as thread:
        assert [world.barrier() for _ in range(3)] == [1, 2, 3]
        with tables.join(run) as other:  # by itself, as another process would
            theirs = thread.submit(lambda: [other.barrier() for _ in range(3)])
            assert [world.barrier() for _ in range(3)] == [4, 5, 6]
            assert theirs.result(10) == [4, 5, 6]
        assert world.barrier() == 7


def test_who_gave_a_barrier_up_has_come_and_its_next_call_ends_it(request):
    with (
        tables.join(name_of_run(request), num_workers=3, timeout_s=0.05) as world,
        world.thread_worker() as second,
        world.thread_worker() as third,
    ):
        with pytest.raises(PeerTimeout, match="Workers 1–2 of 3 did not come") as raised:
            world.barrier()
        assert raised.value.rank == 1
        with pytest.raises(PeerTimeout, match=r"Worker 2 of 3 .*; workers 0–1 did") as raised:
            second.barrier()
        assert raised.value.rank == 2
        assert [each.barrier() for each in (third, world, second)] == [1, 1, 1]
