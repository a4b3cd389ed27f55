"""Tables whose rows are found by key: what one process shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx import tables
from phalanx.errors import ConfigError

NAN = float("nan")


@pytest.fixture
def world():
    with tables.join(timeout_s=20.0) as world:
        yield world


@pytest.mark.parametrize("updater", sorted(tables.updaters._BUILT_IN.keys() - {"blend"}))
def test_every_updater_does_to_keys_what_it_does_to_rows(world, updater):
    size = 200
    draw = torch.Generator().manual_seed(1)
    keys = torch.randperm(size, generator=draw) * 7919 - 10**5
    ours = world.keys(3, init=1.0, updater=updater)
    plain = world.matrix(size, 3, init=1.0, updater=updater)
    for _ in range(12):
        rows = torch.randperm(size, generator=draw)[:60]  # of repeats the sums may differ
        delta = torch.randn(60, 3, generator=draw)
        ours.add(delta, rows=keys[rows])
        plain.add(delta, rows=rows)
    assert torch.equal(ours.get(keys), plain.get())


class Fails(tables.Updater):
    name = "fails"

    def apply(self, rows: torch.Tensor, delta: torch.Tensor, states: list[torch.Tensor]) -> None:
        raise RuntimeError("no")


def test_an_updater_that_fails_brings_no_key(world):
    table = world.keys(2, updater=Fails())
    for rows in ([1, 2], list(range(100))):
        with pytest.raises(RuntimeError, match="no"):
            table.add(torch.ones(len(rows), 2), rows=rows)
        assert len(table) == 0
        assert table.keys().tolist() == []
        assert table.get(rows).sum() == 0


def test_what_a_uniform_table_holds_depends_on_key_and_seed_alone(world):
    keys = torch.arange(-500, 500)
    rule = tables.Uniform(-0.25, 0.5, seed=11)
    first = world.keys(8, init=rule).get(keys)
    grown = world.keys(8, init=rule)
    grown.add(torch.zeros(1000, 8), rows=keys.flip(0))
    assert torch.equal(grown.get(keys), first)
    assert first.unique().numel() > 7990
    assert (first.min() >= -0.25) & (first.max() < 0.5)
    assert first.mean().item() == pytest.approx(0.125, abs=0.01)
    assert first.var().item() == pytest.approx(0.75**2 / 12, rel=0.05)
    other = world.keys(8, init=tables.Uniform(-0.25, 0.5, seed=12)).get(keys)
    assert not (other == first).any()


NOT_INT64 = "`rows` must be a list of int64 numbers"


@pytest.mark.parametrize(
    ("delta", "rows", "message"),
    [
        (torch.ones(2, 3), None, "`rows` must be keys of table 'embed' to read or add to, but is"),
        (torch.ones(2, 3), [0.5, 1.5], f"{NOT_INT64}, but is of torch.float32"),
        (torch.ones(2, 3), [[1, 2]], NOT_INT64),
        (torch.ones(1, 3), [1 << 63], "`rows` must hold plain numbers"),
        (torch.ones(1, 3), np.array([1 << 63], np.uint64), NOT_INT64),
        (torch.ones(2, 3), [1, 2, 3], r"`delta` must have shape \(3, 3\) for table 'embed'"),
        (torch.ones(2, 2), [1, 2], r"`delta` must have shape \(2, 3\)"),
        (torch.ones(2, 3).double(), [1, 2], "`delta` must be of torch.float32 like table 'embed'"),
        (torch.tensor([[1, NAN, 1]]), [6], "`delta` must be finite for table 'embed'"),
    ],
)
def test_an_add_that_cannot_be_is_refused_and_brings_no_key(world, delta, rows, message):
    table = world.keys(3, name="embed", updater="adam", init=1.0)
    table.add(torch.ones(2, 3), rows=[1, 2])
    before = table._storage.copy_all(1.0)
    with pytest.raises(ConfigError, match=message):
        table.add(delta, rows=rows)
    for part, was in zip(table._storage.copy_all(1.0), before, strict=True):
        assert torch.equal(part, was)
