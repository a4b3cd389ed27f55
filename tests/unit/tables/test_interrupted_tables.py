"""Ctrl-C in an add, and a world that is closed during one: adds are whole, and others go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import torch

from phalanx import tables
from phalanx.clock import now_s
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import RangeLock, fail_points, locks
from phalanx.tables import shard
from tests.interrupts import interrupt_at

pytestmark = pytest.mark.promise("interrupts-leave-whole-steps")

LONG_S = 60.0
SHORT_S = 0.5
ROWS = [4, 0, 2]
MOST_PLACES = 1000

Worlds = tuple[tables.TableGroup, tables.TableGroup]


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Two workers that share nothing of this process, as two processes would."""
    run = f"test-interrupts-{uuid4().hex}"
    with tables.join(run, timeout_s=LONG_S) as one, tables.join(run, timeout_s=SHORT_S) as other:
        yield one, other


def add_interrupted_everywhere(worlds: Worlds, updater: str) -> int:
    """Interrupt an add at every place, each time let the other world add; count the places."""
    ours, theirs = (w.matrix(5, 3, "float64", name="t", updater=updater) for w in worlds)
    kept = []
    for number in range(MOST_PLACES):
        before = theirs.get()
        try:
            with interrupt_at(number, locks, shard):
                ours.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)
        except KeyboardInterrupt as exc:
            kept.append(exc)  # with all that its frames keep
        else:
            return number
        step = theirs.get() - before
        assert len(step[ROWS].unique()) == 1, "half an add"
        assert step[[1, 3]].eq(0).all()
        theirs.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)
    raise AssertionError("the add never ended")


@pytest.mark.parametrize("updater", ["sum", "sgd"])
def test_no_interrupt_of_an_add_keeps_others_out(worlds, updater):
    assert add_interrupted_everywhere(worlds, updater) > 20


def test_without_the_token_one_would(worlds, monkeypatch):
    """The planted bug: nobody notices that a block was left."""
    with monkeypatch.context() as patch:
        patch.setattr(locks._Guard, "lost", lambda self, token: None)
        with pytest.raises(PeerTimeout):
            add_interrupted_everywhere(worlds, "sum")


def wait_until_closing(world: tables.TableGroup) -> None:
    deadline = now_s() + LONG_S
    while not world.closed:
        assert now_s() < deadline


@pytest.mark.parametrize("buggy", [False, True])
def test_a_world_is_not_closed_under_an_add(worlds, monkeypatch, buggy):
    """The planted bug: closing does not wait, and another worker undoes the add that goes on."""
    ours = worlds[0]
    table, other = (world.matrix(5, 3, "float64", name="t") for world in worlds)
    came, told = threading.Event(), threading.Event()
    adding = threading.get_ident()

    def stop(point: str, worker: int) -> None:
        if point == "undo written" and threading.get_ident() == adding:
            came.set()
            assert told.wait(LONG_S)

    def add() -> None:
        nonlocal adding
        adding = threading.get_ident()
        table.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)

    monkeypatch.setattr(fail_points, "_injected", stop)
    if buggy:
        monkeypatch.setattr(RangeLock, "await_free", lambda self, waiting: None)
    with ThreadPoolExecutor(2) as pool:
        adder = pool.submit(add)
        assert came.wait(LONG_S)
        closer = pool.submit(ours.close)
        wait_until_closing(ours)
        if buggy:
            closer.result(LONG_S)
            other.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)
        else:
            with pytest.raises(PeerTimeout):
                other.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)
        told.set()
        adder.result(LONG_S)
        closer.result(LONG_S)
    assert other.stats().undone == int(buggy)
    if not buggy:
        assert other.get()[ROWS].eq(1).all()


def test_a_world_that_is_closed_in_its_own_add_refuses_and_goes_on(monkeypatch):
    world = tables.join(timeout_s=LONG_S)
    table = world.matrix(5, 3)
    told = []

    def close(point: str, worker: int) -> None:
        if point == "undo written":
            with pytest.raises(StateError, match="but this thread holds it"):
                world.close()
            told.append(point)

    with monkeypatch.context() as patch:
        patch.setattr(fail_points, "_injected", close)
        table.add(torch.ones(3, 3), rows=ROWS)
    assert told
    assert table.get()[ROWS].eq(1).all()
    world.close()
    assert world.closed
