"""Rounds of a bulk-synchronous table: gets that are open while adds go on."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from phalanx import tables
from phalanx.errors import PeerTimeout, StateError


def test_an_add_after_an_open_get_is_of_the_next_round_and_loses_none():
    with tables.join(sync=True) as world:
        table = world.array(1)
        table.add([1.0])
        pending = table.async_get()
        table.add([10.0])
        assert pending.wait().tolist() == [1.0]
        assert table.get().tolist() == [11.0]


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
        table = world.array(1, num_shards=2)
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


def test_a_get_that_came_too_late_can_be_waited_for_again():
    with tables.join(sync=True, num_workers=2, timeout_s=0.05) as world:
        other = world.thread_worker()
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        ours.add([1.0])
        pending = ours.async_get()
        with pytest.raises(PeerTimeout) as raised:
            pending.wait()
        assert raised.value.rank == 1
        with pytest.raises(PeerTimeout) as raised:
            pending.wait()  # it has come again, and is not waited for itself
        assert raised.value.rank == 1
        arrived = theirs.async_get()
        assert pending.wait().tolist() == arrived.wait().tolist() == [1.0]
        other.close()


def test_who_gave_a_get_up_is_not_named_in_place_of_who_stayed_away():
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
        last = gets[2]()
        with pytest.raises(PeerTimeout, match="They had come before, and given up") as raised:
            last.wait()
        assert raised.value.rank == 0


def test_threads_that_share_a_worker_lose_no_add():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with tables.join(sync=True) as world:
            table = world.matrix(8, 4)

            def add_many() -> None:
                for turn in range(300):
                    table.add(torch.ones(2, 4), rows=[turn % 8, 0])

            threads = [threading.Thread(target=add_many) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert table.get().sum() == 3 * 300 * 2 * 4
    finally:
        sys.setswitchinterval(interval)


def test_who_has_left_adds_nothing_between_the_gets_of_a_round():
    with (
        tables.join(sync=True) as world,
        world.thread_worker() as other,
        world.thread_worker() as gone,
    ):
        ours, theirs, its = (w.array(1, name="x") for w in (world, other, gone))
        its.add([1.0])
        gone.leave()
        first, second = ours.async_get(), theirs.async_get()
        read = first.wait()
        with pytest.raises(StateError, match=r"worker 2 has left. Add before `leave\(\)`"):
            its.add([5.0])
        assert read.tolist() == second.wait().tolist() == its.get().tolist() == [1.0]


def test_a_get_that_gives_up_leaves_a_later_one_its_arrival(monkeypatch):
    with tables.join(sync=True, num_workers=2, timeout_s=60.0) as world:
        other = world.thread_worker()
        ours, theirs = world.array(1, name="x"), other.array(1, name="x")
        first, second = ours.async_get(), ours.async_get()
        rounds, waits = ours._storage.here.rounds, threading.Event()
        finish = rounds.finish

        def finish_later(arrival: object, timeout_s: float) -> None:
            waits.set()
            finish(arrival, timeout_s)

        with ThreadPoolExecutor(1) as pool:
            monkeypatch.setattr(rounds, "finish", finish_later)
            later = pool.submit(second.wait)
            assert waits.wait(60.0)
            world.timeout_s = 0.05
            with pytest.raises(PeerTimeout):
                first.wait()
            theirs.add([1.0])
            for _ in range(2):
                pending = theirs.async_get()
            assert later.result(60.0).tolist() == pending.wait().tolist() == [1.0]
