"""A keys table against a plain dictionary, whatever its workers do, in whatever order."""

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
from phalanx.tables import keys, part
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.multiprocess.test_tables import die_at
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("tables-one-contract")

COLS = 2
FIRST = 5
DEADLINE_S = 60.0
_numbers = itertools.count()

a_key = st.integers(-12, 12) | st.sampled_from([(1 << 63) - 1, -(1 << 63), 1 << 40])
key_lists = st.lists(a_key, max_size=14)
values = st.integers(-1000, 1000)
POINTS = (*part.POINTS, *keys.POINTS)


def open_table(world: tables.TableGroup, num_shards: int) -> tables.KeyTable:
    return world.keys(COLS, torch.int64, name="t", init=FIRST, num_shards=num_shards, capacity=1)


def die_adding(parent: Parent, run: str, shards: int, point: str, keys: list[int]) -> None:
    part.BLOCK_ROWS = 2
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, shards)
        die_at(point, 1)
        table.add(torch.full((len(keys), COLS), 12345), rows=keys)


class KeyTableMachine(RuleBasedStateMachine):
    """Workers of one process, and others that die; integers, so that every sum is exact."""

    @initialize(num_shards=st.sampled_from([1, 1, 3]))
    def begin(self, num_shards: int) -> None:
        self.run = f"d{os.getpid()}-{next(_numbers)}"
        self.shards = num_shards
        first = tables.join(self.run, timeout_s=DEADLINE_S)
        self.worlds = [first]
        self.tables = [open_table(first, num_shards)]
        self.model: dict[int, np.ndarray] = {}
        self.saved: dict[int, np.ndarray] | None = None
        self.folder = tempfile.TemporaryDirectory()

    def pick(self, k: int) -> tables.KeyTable:
        return self.tables[k % len(self.tables)]

    @property
    def master(self) -> tables.KeyTable:
        lowest = min(range(len(self.worlds)), key=lambda i: self.worlds[i].worker_id)
        return self.tables[lowest]

    @staticmethod
    def put(model: dict[int, np.ndarray], keys: list[int], delta: np.ndarray) -> None:
        for key, row in zip(keys, delta, strict=True):
            model[key] = model.get(key, np.full(COLS, FIRST)) + row

    @rule(k=st.integers(0, 5), keys=key_lists, value=values, as_numpy=st.booleans())
    def add(self, k: int, keys: list[int], value: int, as_numpy: bool) -> None:
        delta = value + np.arange(len(keys) * COLS, dtype=np.int64).reshape(len(keys), COLS)
        self.put(self.model, keys, delta)
        given = np.array(keys, dtype=np.int64) if as_numpy else keys
        self.pick(k).add(delta if as_numpy else torch.from_numpy(delta), rows=given)

    @rule(k=st.integers(0, 5), first=st.integers(20, 400), value=values)
    def add_many(self, k: int, first: int, value: int) -> None:
        keys = list(range(first, first + 40))  # so that it grows
        delta = np.full((40, COLS), value)
        self.put(self.model, keys, delta)
        self.pick(k).add(torch.from_numpy(delta), rows=keys)

    @rule(k=st.integers(0, 5), keys=st.lists(a_key, min_size=1, max_size=5))
    def refuse(self, k: int, keys: list[int]) -> None:
        with pytest.raises(ConfigError):
            self.pick(k).add(torch.ones(len(keys), COLS + 1, dtype=torch.int64), rows=keys)

    @rule(keys=st.lists(a_key, max_size=8, unique=True), value=values)
    def assign(self, keys: list[int], value: int) -> None:
        self.master.assign(torch.full((len(keys), COLS), value), rows=keys)
        self.model.update({key: np.full(COLS, value) for key in keys})

    @rule(k=st.integers(0, 5), keys=key_lists)
    def get(self, k: int, keys: list[int]) -> None:
        expected = [self.model.get(key, np.full(COLS, FIRST)).tolist() for key in keys]
        assert self.pick(k).get(keys).tolist() == expected

    @rule(k=st.integers(0, 5))
    def get_all(self, k: int) -> None:
        table = self.pick(k)
        keys = table.keys()
        assert keys.tolist() == sorted(self.model)
        assert len(table) == len(self.model)
        if len(keys):
            expected = np.stack([self.model[key] for key in sorted(self.model)])
            np.testing.assert_array_equal(table.get(keys).numpy(), expected)

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
        self.tables.append(open_table(self.worlds[-1], self.shards))

    @precondition(lambda self: len(self.worlds) > 1)
    @rule(k=st.integers(0, 5))
    def leave(self, k: int) -> None:
        k %= len(self.worlds)
        self.worlds.pop(k).close()
        self.tables.pop(k)

    @rule(point=st.sampled_from(POINTS), keys=st.lists(a_key, min_size=5, max_size=40))
    def die(self, point: str, keys: list[int]) -> None:
        with Children() as children:
            child = children.start(die_adding, self.run, self.shards, point, keys)
            wait_for_exit(child.pid)
        table = self.tables[0]
        after = dict(self.model)
        self.put(after, keys, np.full((len(keys), COLS), 12345))
        there = set(table.keys().tolist())
        asked = torch.tensor(sorted(set(keys)))
        now = dict(zip(asked.tolist(), table.get(asked).numpy(), strict=True))
        mine = asked.tolist()
        taken = [key in there and np.array_equal(now[key], after[key]) for key in mine]
        as_before = [
            (key in there) == (key in self.model)
            and np.array_equal(now[key], self.model.get(key, np.full(COLS, FIRST)))
            for key in mine
        ]
        assert all(taken) or all(as_before)
        if all(taken):
            self.model.update({key: after[key] for key in mine})

    def teardown(self) -> None:
        for world in getattr(self, "worlds", []):
            world.close()
        if hasattr(self, "run"):
            self.folder.cleanup()
            wait_until_removed(self.run)


HOW = settings(
    max_examples=5,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class TestKeyTableMachine(KeyTableMachine.TestCase):
    settings = HOW


@pytest.mark.night
class TestKeyTableMachineForLonger(KeyTableMachine.TestCase):
    settings = settings(HOW, max_examples=50)
