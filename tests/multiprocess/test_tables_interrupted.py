"""Ctrl-C in calls over several hosts: no lock stays held, no call is left, later ones are right."""

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
from phalanx.tables import remote_part, router
from tests.interrupts import interrupt_at
from tests.multiprocess import hosts
from tests.multiprocess.hosts import run_hosts

pytestmark = pytest.mark.promise("interrupts-leave-whole-steps")

MODULES = (router, remote_part, connection, contextlib, threading)
MOST_PLACES = 400


@pytest.fixture(scope="module", autouse=True)
def children_end():
    yield
    hosts.WORKERS.close()


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
    table = world.array(8, torch.int64, name="t", sync=kind == "add to a round")
    ones, out = torch.ones(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    world.barrier()
    num_places = 0
    if world.worker_id == 0:
        acts = {
            "add": lambda: table.add(ones),
            "add to a round": lambda: table.add(ones),
            "get": lambda: table.get(out=out),
        }

        def check() -> None:
            assert not table._storage._turn_of(0).locked()
            if kind == "get":
                out.fill_(-1)  # the caller's again
                assert table.get([0, 7]).tolist() == [0, 0]
                assert out.tolist() == [-1] * 8

        num_places = interrupted_everywhere(acts[kind], check)
        assert num_places > 20
    found = table.get().tolist()
    if world.worker_id == 0 and kind != "get":
        table_is_whole = len(set(found[:4])) == len(set(found[4:])) == 1
        assert table_is_whole, found
        assert all(1 <= each <= num_places + 1 for each in found), found
    world.barrier()


@pytest.mark.parametrize("kind", ["add", "add to a round", "get"])
def test_a_call_interrupted_anywhere_holds_nothing_back(run, kind):
    run_hosts(2, run, 2, partial(be_interrupted, kind=kind))


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
