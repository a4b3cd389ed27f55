"""Rounds of a bulk-synchronous table, with gets that are open, and barriers: whom they name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx import tables
from phalanx.errors import PeerTimeout, StateError

pytestmark = pytest.mark.promise("every-wait-ends")


def test_a_round_that_others_have_not_come_to_keeps_its_adds_beside_those_of_the_next():
    with tables.join(sync=True, num_workers=2) as world, world.thread_worker() as other:
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        ours.add([1.0])
        pending = ours.async_get()
        ours.add([10.0])
        theirs.add([100.0])
        assert theirs.get().tolist() == pending.wait().tolist() == [101.0]
        first, second = ours.async_get(), theirs.async_get()
        assert first.wait().tolist() == second.wait().tolist() == [111.0]


def test_a_get_that_nobody_waits_for_loses_no_add():
    with tables.join(sync=True) as world:
        table = world.array(1)
        table.add([1.0])
        table.async_get()
        table.add([10.0])
        assert table.get().tolist() == [11.0]


def test_a_third_round_of_adds_is_refused_while_two_are_open():
    with tables.join(sync=True) as world:
        table = world.array(1)
        for value in (1.0, 10.0):
            table.add([value])
            pending = table.async_get()
        with pytest.raises(StateError, match=r"At most one round .* Call `wait\(\)`"):
            table.add([100.0])
        assert pending.wait().tolist() == [11.0]


def test_a_round_is_in_when_the_last_one_comes_though_others_have_timed_out():
    with (
        tables.join(sync=True, num_workers=3, timeout_s=0.05) as world,
        world.thread_worker() as second,
        world.thread_worker() as third,
    ):
        gets = [each.array(1, name="x").async_get for each in (world, second, third)]
        pending = [get() for get in gets[:2]]
        for each in (*pending, pending[0]):
            with pytest.raises(PeerTimeout, match="Worker 2 of 3 did not come to get 1") as raised:
                each.wait()
            assert raised.value.rank == 2
        for late in (gets[2](), *pending):
            assert late.wait().tolist() == [0.0]


@pytest.mark.parametrize(
    "again",
    [lambda table: table.get(), lambda table: table.async_get().wait()],
    ids=["get", "async_get"],
)
def test_a_get_after_one_that_timed_out_is_of_the_same_round(again):
    with (
        tables.join(sync=True, num_workers=2, timeout_s=0.05) as world,
        world.thread_worker() as other,
    ):
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        ours.add([1.0])
        with pytest.raises(PeerTimeout):
            ours.get()
        ours.add([10.0])  # of the next round
        theirs.add([100.0])
        theirs.async_get()
        assert again(ours).tolist() == [101.0]
        theirs.async_get()
        assert again(ours).tolist() == [111.0]


def test_who_opens_a_table_again_stays_arrived():
    with (
        tables.join(sync=True, num_workers=2, timeout_s=5) as world,
        world.thread_worker() as other,
    ):
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        ours.add([1.0])
        pending = ours.async_get()
        world.array(1, name="x")
        assert theirs.get().tolist() == pending.wait().tolist() == [1.0]


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
