"""A table against a plain dictionary, whatever its workers do, in whatever order."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx import tables
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("tables-one-contract")

ROWS, COLS, FIRST = 25, 2, 5
KEYS = [*range(-12, 13), (1 << 63) - 1, -(1 << 63), 1 << 40]
DEADLINE_S = 60.0


class Course:
    """Workers of one process do what chance says; integers, so that every sum is exact.

    The model has the rows of a matrix, or those keys that have come.
    """

    def __init__(self, run: str, by_key: bool, folder: Path, chance: random.Random) -> None:
        self.run, self.by_key, self.folder, self.chance = run, by_key, folder, chance
        self.handles: list[tuple[tables.TableGroup, tables.Table]] = []
        self.come()
        self.model = {} if by_key else dict.fromkeys(range(ROWS), np.full(COLS, FIRST))
        self.save()

    def pick(self) -> tables.Table:
        return self.chance.choice(self.handles)[1]

    @property
    def master(self) -> tables.Table:
        return min(self.handles, key=lambda handle: handle[0].worker_id)[1]

    def some(self, least: int = 0) -> list[int]:
        return self.chance.choices(KEYS if self.by_key else range(ROWS), k=least + self.number(14))

    def number(self, stop: int) -> int:
        return self.chance.randrange(stop)

    def come(self) -> None:
        joined = None
        if self.handles and self.number(2):
            joined = self.handles[0][0].thread_worker()
        world = joined or tables.join(self.run, timeout_s=DEADLINE_S)
        make: Callable[..., tables.Table] = world.matrix
        shape = (ROWS, COLS)
        if self.by_key:
            make, shape = world.keys, (COLS,)
        self.handles.append((world, make(*shape, torch.int64, name="t", init=FIRST)))

    def leave(self) -> None:
        if len(self.handles) > 1:
            self.handles.pop(self.number(len(self.handles)))[0].close()

    def add(self) -> None:
        rows = self.some()
        if self.by_key and self.number(4) == 0:  # so that the table grows
            rows = list(range(start := self.number(400), start + 40))
        delta = self.number(2000) - 1000 + np.arange(len(rows) * COLS).reshape(-1, COLS)
        for row, change in zip(rows, delta, strict=True):
            self.model[row] = self.model.get(row, np.full(COLS, FIRST)) + change
        as_numpy = self.number(2)
        given = np.array(rows, dtype=np.int64) if as_numpy else rows
        self.pick().add(delta if as_numpy else torch.from_numpy(delta), rows=given)

    def refuse(self) -> None:
        rows = self.some(least=1)
        with pytest.raises(ConfigError):
            self.pick().add(torch.ones(len(rows), COLS + 1, dtype=torch.int64), rows=rows)

    def get(self) -> None:
        rows = self.some()
        expected = [self.model.get(row, np.full(COLS, FIRST)).tolist() for row in rows]
        assert self.pick().get(rows).tolist() == expected

    def get_all(self) -> None:
        table, rows = self.pick(), None
        if isinstance(table, tables.KeyTable):
            rows = table.keys()
            assert rows.tolist() == sorted(self.model)
            assert len(table) == len(self.model)
        assert table.get(rows).tolist() == [self.model[row].tolist() for row in sorted(self.model)]

    def save(self) -> None:
        self.pick().snapshot(self.folder)
        self.saved = dict(self.model)

    def restore(self) -> None:
        self.master.restore(self.folder)
        self.model = dict(self.saved)


ACTS = [Course.add] * 4 + [Course.get, Course.get_all] * 2
ACTS += [Course.refuse, Course.save, Course.restore, Course.come, Course.leave]


@pytest.mark.parametrize("acts", [300, pytest.param(1500, marks=pytest.mark.night)])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_table_is_a_dictionary_whatever_its_workers_do(run, by_key, acts, tmp_path):
    seed = random.randrange(2**32)
    print("seed", seed)
    course = Course(run, by_key, tmp_path, random.Random(seed))
    for _ in range(acts):
        course.chance.choice(ACTS)(course)
    for world, _ in course.handles:
        world.close()
