"""Updaters against closed forms in float64, written out here a second time; workers take turns."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx import tables
from tests.worlds import in_table_worlds

pytestmark = pytest.mark.promise("updaters-are-their-formulas")

STEPS, ROWS, COLS = 30, 6, 3


def closed_form(name: str, w: torch.Tensor, gradients: list) -> torch.Tensor:
    """Go through (rows, gradient) pairs one number at a time."""
    w = w.clone()
    s, h, v, t = (torch.zeros_like(w) for _ in range(4))
    for rows, gradient in gradients:
        for r, g_row in zip(rows, gradient, strict=True):
            for c, g in enumerate(g_row):
                if name == "sum":
                    w[r, c] += g
                elif name == "sgd":
                    w[r, c] -= 0.1 * g
                elif name in ("momentum", "nesterov"):
                    s[r, c] = 0.9 * s[r, c] + g
                    w[r, c] -= 0.1 * (g + 0.9 * s[r, c] if name == "nesterov" else s[r, c])
                elif name == "adagrad":
                    h[r, c] += g**2
                    w[r, c] -= 0.1 * g / (math.sqrt(h[r, c]) + 1e-6)
                elif name == "adam":
                    t[r, c] += 1
                    s[r, c] = 0.9 * s[r, c] + 0.1 * g
                    v[r, c] = 0.99 * v[r, c] + 0.01 * g * g
                    m_hat = s[r, c] / (1 - 0.9 ** t[r, c])
                    v_hat = v[r, c] / (1 - 0.99 ** t[r, c])
                    w[r, c] -= 0.1 * m_hat / (math.sqrt(v_hat) + 1e-8)
    return w


OPTIONS = {
    "sum": {},
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "nesterov": {"lr": 0.1, "momentum": 0.9},
    "adagrad": {"lr": 0.1, "eps": 1e-6},
    "adam": {"lr": 0.1, "beta2": 0.99},
}


def drawn(draw: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    """Draw rows; all workers draw the same."""
    return torch.randn(rows, COLS, dtype=torch.float64, generator=draw)


def add_in_turn(world: tables.TableGroup) -> None:
    for name, options in OPTIONS.items():
        draw = torch.Generator().manual_seed(7)
        first, gradients = drawn(draw), []
        updater = {"name": name, **options}
        table = world.matrix(ROWS, COLS, torch.float64, name=name, updater=updater, init=first)
        assert torch.equal(table.get(), first)
        world.barrier()
        for step in range(STEPS):
            count = ROWS if step % 3 == 0 else step % 5
            rows = torch.arange(ROWS) if count == ROWS else torch.randperm(ROWS, generator=draw)
            rows = rows[:count].tolist()
            gradients.append((rows, drawn(draw, count)))
            if step % world.num_workers == world.worker_id:
                table.add(gradients[-1][1], rows=None if count == ROWS else rows)
            world.barrier()
        expected = closed_form(name, first, gradients)
        torch.testing.assert_close(table.get(), expected, rtol=1e-12, atol=1e-12)


@in_table_worlds()
def test_an_updater_follows_its_closed_form(world, n, run):
    world.run(add_in_turn, n, run=run)


def test_rows_given_twice_add_up_before_the_updater_sees_them():
    with tables.join() as world:
        table = world.array(3, torch.float64, updater={"name": "adagrad", "lr": 1.0, "eps": 0.0})
        table.add([1.0, 2.0], rows=[1, 1])  # h = (1 + 2)², so the step is 1, not two of them
        assert table.get().tolist() == [0.0, -1.0, 0.0]


class Newest(tables.Updater):
    name = "newest for tests"
    any_dtype = True

    def apply(self, rows: torch.Tensor, delta: torch.Tensor, states: list[torch.Tensor]) -> None:
        rows.copy_(delta)
        if (delta == 13).any():
            raise RuntimeError("unlucky")


class Bounded(tables.Sgd):
    name = "bounded for tests"

    def apply(self, rows: torch.Tensor, delta: torch.Tensor, states: list[torch.Tensor]) -> None:
        rows.sub_(delta.clamp(-1, 1), alpha=self.lr)


def test_a_subclass_of_a_built_in_updater_applies_its_own_rule():
    with tables.join() as world:
        table = world.matrix(3, 2, updater=Bounded(lr=0.5))
        table.add([[4.0, -0.5]], rows=[1])
        assert table.get().tolist() == [[0, 0], [-0.5, 0.25], [0, 0]]


class DelayCompensated(tables.Updater):
    """A row is (w, nothing), a delta (g, the w that g was computed with): arXiv 1609.08326."""

    name = "delay-compensated for tests"

    def apply(self, rows: torch.Tensor, delta: torch.Tensor, states: list[torch.Tensor]) -> None:
        w, (g, seen) = rows[:, :COLS], delta.chunk(2, 1)
        w.sub_(0.1 * (g + 0.5 * g.square() * (w - seen)))


def test_an_updater_of_ones_own_compensates_the_delay_of_gradients():
    draw = torch.Generator().manual_seed(7)
    with tables.join() as world:
        table = world.matrix(ROWS, 2 * COLS, torch.float64, updater=DelayCompensated())
        values = [torch.zeros(ROWS, COLS, dtype=torch.float64)]
        for step in range(STEPS):
            w, seen, g = values[-1], values[max(0, step - 2)], drawn(draw)
            table.add(torch.cat([g, seen], 1))
            values.append(w - 0.1 * (g + 0.5 * g * g * (w - seen)))
        torch.testing.assert_close(table.get()[:, :COLS], values[-1], rtol=1e-12, atol=1e-12)


def test_an_updater_of_the_users_serves_and_what_it_raises_changes_nothing():
    with tables.join() as world:
        table = world.matrix(5, 2, torch.int32, updater=Newest(), init=7)
        table.add([[1, 2], [3, 4]], rows=[4, 0])
        before = table.get()
        assert before.tolist() == [[3, 4], [7, 7], [7, 7], [7, 7], [1, 2]]
        for rows in ([1, 2], None):
            delta = torch.full((5 if rows is None else 2, 2), 13, dtype=torch.int32)
            with pytest.raises(RuntimeError, match="unlucky"):
                table.add(delta, rows=rows)
            assert torch.equal(table.get(), before)
