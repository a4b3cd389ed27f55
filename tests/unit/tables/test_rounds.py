"""Rounds of a bulk-synchronous table that others have not come to, and barriers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from phalanx import tables
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import wait_until

pytestmark = pytest.mark.promise("every-wait-ends")


def test_a_third_round_of_adds_is_refused_while_two_are_open():
    with (
        tables.join(sync=True, num_workers=2) as world,
        world.thread_worker() as other,
        ThreadPoolExecutor(2) as threads,
    ):
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        gets = []
        for number, value in ((1, 1.0), (2, 10.0)):
            ours.add([value])
            gets.append(threads.submit(ours.get))
            assert wait_until(lambda number=number: ours._storage.here.clock_of(0) == number, 10)
        with pytest.raises(StateError, match=r"At most one round .* Wait for the gets"):
            ours.add([100.0])
        assert theirs.get().tolist() == gets[0].result(10).tolist() == [1.0]
        assert theirs.get().tolist() == gets[1].result(10).tolist() == [11.0]


def test_a_round_is_in_when_the_last_one_comes_though_others_have_timed_out():
    with (
        tables.join(sync=True, num_workers=3, timeout_s=0.05) as world,
        world.thread_worker() as second,
        world.thread_worker() as third,
    ):
        one, two, late = (each.array(1, name="x") for each in (world, second, third))
        for table, missing in ((one, "Workers 1–2"), (two, "Worker 2"), (one, "Worker 2")):
            with pytest.raises(PeerTimeout, match=f"{missing} of 3 did not come to get 1"):
                table.get()
        assert [table.get().tolist() for table in (late, one, two)] == [[0.0]] * 3


@contextmanager
def after_a_late_get():
    """Give worker 0's group and the table of both workers, after worker 0 has waited in vain."""
    with (
        tables.join(sync=True, num_workers=2, timeout_s=0.05) as world,
        world.thread_worker() as other,
    ):
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        ours.add([1.0])
        with pytest.raises(PeerTimeout):
            ours.get()
        yield world, ours, theirs


def test_a_get_after_one_that_timed_out_is_of_the_same_round():
    with after_a_late_get() as (_, ours, theirs):
        ours.add([10.0])  # of the next round
        theirs.add([100.0])
        assert theirs.get().tolist() == ours.get().tolist() == [101.0]
        with pytest.raises(PeerTimeout):
            theirs.get()
        assert ours.get().tolist() == theirs.get().tolist() == [111.0]


def test_a_worker_that_opens_a_table_again_stays_arrived():
    with after_a_late_get() as (world, ours, theirs):
        world.array(1, name="x")
        assert theirs.get().tolist() == ours.get().tolist() == [1.0]


def test_a_get_ends_though_another_thread_closes_its_group_meanwhile():
    with tables.join(sync=True, num_workers=2) as world, world.thread_worker() as other:
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        with ThreadPoolExecutor(1) as thread:
            get, storage = thread.submit(ours.get), ours._storage
            assert wait_until(lambda: storage.here.clock_of(0) == 1, 10)
            world.close()
            assert theirs.get().tolist() == get.result(10).tolist() == [0.0]


def test_barriers_are_counted_and_those_who_come_later_count_on(run):
    with tables.join(run) as world, ThreadPoolExecutor(1) as thread:
        assert [world.barrier() for _ in range(3)] == [1, 2, 3]
        with tables.join(run) as other:  # by itself, as another process would
            theirs = thread.submit(lambda: [other.barrier() for _ in range(3)])
            assert [world.barrier() for _ in range(3)] == [4, 5, 6]
            assert theirs.result(10) == [4, 5, 6]
        assert world.barrier() == 7


def test_who_gave_a_barrier_up_has_come_and_its_next_call_ends_it(run):
    with (
        tables.join(run, num_workers=3, timeout_s=0.05) as world,
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
