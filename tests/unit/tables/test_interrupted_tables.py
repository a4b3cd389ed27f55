"""Ctrl-C in an add, and a world that is closed during one: adds are whole, and others go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import torch

from phalanx import tables
from phalanx.ipc import mutex
from phalanx.tables import part
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


@pytest.mark.parametrize("updater", ["sum", "sgd", "adam"])
def test_an_interrupted_add_is_whole_or_absent_and_its_thread_goes_on(worlds, updater):
    ours, theirs = (w.matrix(5, 3, "float64", name="t", updater=updater) for w in worlds)
    kept = []
    for number in range(MOST_PLACES):
        before = theirs.get()
        try:
            with interrupt_at(number, mutex, part):
                ours.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)
        except KeyboardInterrupt as exc:
            kept.append(exc)  # with all that its frames keep
        else:
            assert number > 3  # places where it was interrupted
            return
        step = theirs.get() - before
        assert len(step[ROWS].unique()) == 1, "half an add"
        assert step[[1, 3]].eq(0).all()
        theirs.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)
        ours.add(torch.ones(3, 3, dtype=torch.float64), rows=ROWS)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(theirs.add, torch.ones(3, 3, dtype=torch.float64), ROWS).result(LONG_S)
    raise AssertionError("the add never ended")
