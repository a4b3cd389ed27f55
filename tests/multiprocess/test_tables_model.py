"""A table against a plain dictionary, whatever its workers do, in whatever order."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from phalanx import tables
from phalanx.errors import ConfigError
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("tables-one-contract")

ROWS, COLS = 25, 2
FIRST = 5
DEADLINE_S = 60.0
_numbers = itertools.count()

a_key = st.integers(-12, 12) | st.sampled_from([(1 << 63) - 1, -(1 << 63), 1 << 40])
a_row = st.integers(0, ROWS - 1)
values = st.integers(-1000, 1000)


def open_table(world: tables.TableGroup, by_key: bool) -> tables.Table:
    if by_key:
        return world.keys(COLS, torch.int64, name="t", init=FIRST, capacity=1)
    return world.matrix(ROWS, COLS, torch.int64, name="t", init=FIRST)


class TableMachine(RuleBasedStateMachine):
    """Workers of one process; integers, so that every sum is exact.

    The model has the rows of a matrix, or those keys that have come.
    """

    @initialize(by_key=st.booleans())
    def begin(self, by_key: bool) -> None:
        self.run = f"m{os.getpid()}-{next(_numbers)}"
        self.by_key = by_key
        first = tables.join(self.run, timeout_s=DEADLINE_S)
        self.worlds = [first]
        self.tables = [open_table(first, by_key)]
        there = () if by_key else range(ROWS)
        self.model = {row: np.full(COLS, FIRST) for row in there}
        self.saved: dict[int, np.ndarray] | None = None
        self.folder = tempfile.TemporaryDirectory()

    def drawn(self, data: st.DataObject, least: int = 0, most: int = 14) -> list[int]:
        """Draw keys, or rows of a matrix."""
        return data.draw(st.lists(a_key if self.by_key else a_row, min_size=least, max_size=most))

    def pick(self, k: int) -> tables.Table:
        return self.tables[k % len(self.tables)]

    @property
    def master(self) -> tables.Table:
        lowest = min(range(len(self.worlds)), key=lambda i: self.worlds[i].worker_id)
        return self.tables[lowest]

    @staticmethod
    def put(model: dict[int, np.ndarray], rows: list[int], delta: np.ndarray) -> None:
        for each, change in zip(rows, delta, strict=True):
            model[each] = model.get(each, np.full(COLS, FIRST)) + change

    @rule(k=st.integers(0, 5), data=st.data(), value=values, as_numpy=st.booleans())
    def add(self, k: int, data: st.DataObject, value: int, as_numpy: bool) -> None:
        rows = self.drawn(data)
        delta = value + np.arange(len(rows) * COLS, dtype=np.int64).reshape(len(rows), COLS)
        self.put(self.model, rows, delta)
        given = np.array(rows, dtype=np.int64) if as_numpy else rows
        self.pick(k).add(delta if as_numpy else torch.from_numpy(delta), rows=given)

    @rule(k=st.integers(0, 5), first=st.integers(20, 400), value=values)
    def add_many(self, k: int, first: int, value: int) -> None:
        """Add to 40 keys, so that the table grows, or to the whole matrix."""
        rows = list(range(first, first + 40) if self.by_key else range(ROWS))
        delta = np.full((len(rows), COLS), value)
        self.put(self.model, rows, delta)
        self.pick(k).add(torch.from_numpy(delta), rows=rows if self.by_key else None)

    @rule(k=st.integers(0, 5), data=st.data())
    def refuse(self, k: int, data: st.DataObject) -> None:
        rows = self.drawn(data, least=1)
        with pytest.raises(ConfigError):
            self.pick(k).add(torch.ones(len(rows), COLS + 1, dtype=torch.int64), rows=rows)

    @rule(keys=st.lists(a_key, max_size=8, unique=True), value=values)
    def assign(self, keys: list[int], value: int) -> None:
        rows = keys if self.by_key else list(range(ROWS))
        given = {"rows": keys} if self.by_key else {}
        self.master.assign(torch.full((len(rows), COLS), value), **given)
        self.model.update({row: np.full(COLS, value) for row in rows})

    @rule(k=st.integers(0, 5), data=st.data())
    def get(self, k: int, data: st.DataObject) -> None:
        rows = self.drawn(data)
        expected = [self.model.get(row, np.full(COLS, FIRST)).tolist() for row in rows]
        assert self.pick(k).get(rows).tolist() == expected

    @rule(k=st.integers(0, 5))
    def get_all(self, k: int) -> None:
        table, rows = self.pick(k), None
        if self.by_key:
            rows = table.keys()
            assert rows.tolist() == sorted(self.model)
            assert len(table) == len(self.model)
        if self.model:
            expected = np.stack([self.model[row] for row in sorted(self.model)])
            np.testing.assert_array_equal(table.get(rows).numpy(), expected)

    @rule(k=st.integers(0, 5))
    def save(self, k: int) -> None:
        self.pick(k).snapshot(Path(self.folder.name))
        self.saved = dict(self.model)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self) -> None:
        self.master.restore(Path(self.folder.name))
        assert self.saved is not None
        self.model = dict(self.saved)

    @precondition(lambda self: len(self.worlds) < 5)
    @rule(thread=st.booleans())
    def come(self, thread: bool) -> None:
        how = self.worlds[0].thread_worker if thread else lambda: tables.join(self.run)
        self.worlds.append(how())
        self.tables.append(open_table(self.worlds[-1], self.by_key))

    @precondition(lambda self: len(self.worlds) > 1)
    @rule(k=st.integers(0, 5))
    def leave(self, k: int) -> None:
        k %= len(self.worlds)
        self.worlds.pop(k).close()
        self.tables.pop(k)

    def teardown(self) -> None:
        for world in getattr(self, "worlds", []):
            world.close()
        if hasattr(self, "run"):
            self.folder.cleanup()
            wait_until_removed(self.run)


HOW = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class TestTableMachine(TableMachine.TestCase):
    settings = HOW


@pytest.mark.night
class TestTableMachineForLonger(TableMachine.TestCase):
    settings = settings(HOW, max_examples=50)
