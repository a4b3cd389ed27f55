"""Ctrl-C in calls: no lock stays held, no call is left, and each add is whole on each host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import pytest
import torch

from phalanx import tables
from phalanx.cluster import RemoteCall, connection
from phalanx.ipc import mutex
from phalanx.tables import part, remote_host, router
from tests import worlds
from tests.interrupts import interrupt_at
from tests.multiprocess.hosts import run_hosts
from tests.worlds import in_table_worlds

pytestmark = pytest.mark.promise("interrupts-leave-whole-steps")

MODULES = (router, remote_host, connection, mutex, part, contextlib, threading)
UPDATERS = ["sgd", "adam", "sum"]
MOST_PLACES = 400


@pytest.fixture(scope="module", autouse=True)
def worlds_end():
    yield
    worlds.close()


def interrupted_everywhere(act: Callable[[], object], check: Callable[[], None]) -> int:
    """Interrupt a call at every place, each time check; return how many places there are."""
    for number in range(MOST_PLACES):
        try:
            with interrupt_at(number, *MODULES):
                act()
        except KeyboardInterrupt:
            check()
        else:
            return number
    raise AssertionError("the call never ended")


def be_interrupted(world: tables.TableGroup, kind: str) -> None:
    sync, updater = kind == "add to a round", kind if kind in UPDATERS else "sum"
    table = world.matrix(9, 3, torch.float64, name="t", sync=sync, updater=updater)
    ones, out = torch.ones(9, 3, dtype=torch.float64), torch.zeros(9, 3, dtype=torch.float64)
    world.barrier()
    num_places = 0
    if world.worker_id == 0:

        def check() -> None:
            if kind != "get":
                table.add(ones)  # no lock is held
                return
            out.fill_(-1)  # the caller's again
            assert not table.get([0, 8]).any()
            assert out.eq(-1).all()

        act = partial(table.get, out=out) if kind == "get" else partial(table.add, ones)
        num_places = interrupted_everywhere(act, check)
        assert num_places > 3
    world.barrier()
    if kind != "get":
        table.add(ones)  # nor of the other worker
    world.barrier()
    by_host = table.get().view(3, -1)
    assert kind == "get" or all(len(each.unique()) == 1 for each in by_host), by_host
    if num_places and updater == "sum" and kind != "get":
        least = num_places + 1 + world.num_workers  # by `check`, by the last call, by all
        assert all(least <= each[0] <= least + num_places for each in by_host), by_host
    world.barrier()


@in_table_worlds(at_least=3, kind=["get", "add to a round", *UPDATERS])
def test_a_call_interrupted_anywhere_holds_nothing_back(world, n, kind, run):
    world.run(partial(be_interrupted, kind=kind), n, run=run)


def miss_the_end_of_a_barrier(world: tables.TableGroup) -> list[int]:
    if world.worker_id == 1:
        answer = RemoteCall._answer

        def interrupt(call: RemoteCall) -> NoReturn:
            RemoteCall._answer = answer  # type: ignore[method-assign]
            answer(call)
            raise KeyboardInterrupt

        RemoteCall._answer = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            world.barrier()
    return [world.barrier() for _ in range(3)]


def test_after_an_interrupted_barrier_the_next_call_ends_it(run):
    assert run_hosts(2, run, 2, miss_the_end_of_a_barrier) == [[1, 2, 3]] * 2
