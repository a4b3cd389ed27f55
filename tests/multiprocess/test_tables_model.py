"""A table against a plain numpy array, whatever its workers do, in whatever order."""

from __future__ import annotations

import itertools
import os

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from phalanx import tables
from phalanx.tables import part
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.multiprocess.test_tables import die_at
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("tables-one-contract")

ROWS, COLS = 7, 3
DEADLINE_S = 60.0
_numbers = itertools.count()

row_lists = st.lists(st.integers(0, ROWS - 1), max_size=2 * ROWS)
values = st.integers(-1000, 1000)


def open_table(world: tables.TableGroup, num_shards: int) -> tables.Table:
    return world.matrix(ROWS, COLS, torch.int64, name="t", num_shards=num_shards)


def die_adding(parent: Parent, run: str, shards: int, point: str, rows: list | None) -> None:
    part.BLOCK_ROWS = 2
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, shards)
        die_at(point, 1)
        num_rows = ROWS if rows is None else len(rows)
        table.add(torch.full((num_rows, COLS), 12345), rows=rows)


class TableMachine(RuleBasedStateMachine):
    """Workers of one process, and others that die; integers, so that every sum is exact."""

    @initialize(num_shards=st.sampled_from([1, 1, 3, 10]))
    def begin(self, num_shards: int) -> None:
        self.run = f"m{os.getpid()}-{next(_numbers)}"
        self.shards = num_shards
        first = tables.join(self.run, timeout_s=DEADLINE_S)
        self.worlds = [first]
        self.tables = [open_table(first, num_shards)]
        self.model = np.zeros((ROWS, COLS), dtype=np.int64)

    def pick(self, k: int) -> tables.Table:
        return self.tables[k % len(self.tables)]

    @rule(k=st.integers(0, 5), rows=row_lists, value=values, as_numpy=st.booleans())
    def add_rows(self, k: int, rows: list[int], value: int, as_numpy: bool) -> None:
        delta = value + np.arange(len(rows) * COLS, dtype=np.int64).reshape(len(rows), COLS)
        np.add.at(self.model, rows, delta)
        given = np.array(rows, dtype=np.int64) if as_numpy else rows
        self.pick(k).add(delta if as_numpy else torch.from_numpy(delta), rows=given)

    @rule(k=st.integers(0, 5), value=values)
    def add_all(self, k: int, value: int) -> None:
        self.model += value
        self.pick(k).add(torch.full((ROWS, COLS), value))

    @rule(value=values)
    def assign(self, value: int) -> None:
        master = min(range(len(self.worlds)), key=lambda i: self.worlds[i].worker_id)
        self.model[:] = value
        self.tables[master].assign(torch.full((ROWS, COLS), value))

    @rule(k=st.integers(0, 5), rows=row_lists)
    def get_rows(self, k: int, rows: list[int]) -> None:
        np.testing.assert_array_equal(self.pick(k).get(rows).numpy(), self.model[rows])

    @rule(k=st.integers(0, 5))
    def get_all(self, k: int) -> None:
        np.testing.assert_array_equal(self.pick(k).get().numpy(), self.model)

    @precondition(lambda self: len(self.worlds) < 5)
    @rule(thread=st.booleans())
    def come(self, thread: bool) -> None:
        how = self.worlds[0].thread_worker if thread else lambda: tables.join(self.run)
        self.worlds.append(how())
        self.tables.append(open_table(self.worlds[-1], self.shards))

    @precondition(lambda self: len(self.worlds) > 1)
    @rule(k=st.integers(0, 5))
    def leave(self, k: int) -> None:
        k %= len(self.worlds)
        self.worlds.pop(k).close()
        self.tables.pop(k)

    @rule(
        point=st.sampled_from(part.POINTS),
        rows=st.none() | st.lists(st.integers(0, ROWS - 1), min_size=5, max_size=9),
    )
    def die(self, point: str, rows: list[int] | None) -> None:
        with Children() as children:
            child = children.start(die_adding, self.run, self.shards, point, rows)
            wait_for_exit(child.pid)
        now = self.tables[0].get().numpy()
        added = now - self.model
        assert set(np.unique(added)) <= set(range(0, 12345 * 10, 12345))
        where = slice(None) if rows is None else rows
        full = np.zeros_like(self.model)
        np.add.at(full, where, 12345)
        assert np.array_equal(added, full) or not added.any()
        self.model = now.copy()

    def teardown(self) -> None:
        for world in getattr(self, "worlds", []):
            world.close()
        if hasattr(self, "run"):
            wait_until_removed(self.run)


HOW = settings(
    max_examples=5,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class TestTableMachine(TableMachine.TestCase):
    settings = HOW


@pytest.mark.night
class TestTableMachineForLonger(TableMachine.TestCase):
    settings = settings(HOW, max_examples=50)
