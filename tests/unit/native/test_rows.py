"""Rows of tables in C: it does what torch does, bit for bit, where rows are added one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx import tables
from phalanx.memory import all_within
from tests.products import some_by_day
from tests.unit.memory.numbers import DTYPES, drawn

ROWS, ODD = 1009, 7


def some_rows(count: int, seed: int = 0) -> Tensor:
    """Return row numbers; many are given more than once."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, min(ROWS, 2 * count + 1), (count,), generator=draw)


def added(values: Tensor, numbers: Tensor, delta: Tensor, scale: float) -> Tensor:
    """Add one row after the other; what a row is given twice is added twice."""
    values = values.clone()
    for number, row in zip(numbers.tolist(), delta, strict=True):
        if scale == 1:
            values[number] += row
        else:  # a bfloat16 is rounded once
            wide = torch.float32 if values.dtype == torch.bfloat16 else values.dtype
            values[number] = (values[number].to(wide) + row.to(wide) * scale).to(values.dtype)
    return values


@some_by_day("dtype, cols, count, scale", DTYPES, [1, 64, 333], [0, 1, ODD, 999], [1.0, -0.5, 0.3])
def test_rows_of_tables_are_read_and_added_to(dtype, cols, count, scale):
    scale = scale if dtype.is_floating_point else 1.0
    updater = "sum" if scale == 1.0 else tables.Sgd(lr=abs(scale))
    values, numbers = drawn(dtype, ROWS, cols), some_rows(count)
    delta = drawn(dtype, count, cols, seed=1)
    with tables.join() as world:
        table = world.matrix(ROWS, cols, dtype, init=values, updater=updater)
        out = torch.empty(count, cols, dtype=dtype)
        assert table.get(numbers, out=out) is out
        assert torch.equal(out, values[numbers])
        table.add(delta, rows=numbers.int().numpy())
        wanted = added(values, numbers, delta, scale if scale == 1.0 else -abs(scale))
        assert torch.equal(table.get(), wanted)


@pytest.mark.parametrize("first", [0, ODD])
@pytest.mark.parametrize("count", [0, 1, ODD, 1001])
@pytest.mark.parametrize("bad", [-1, ROWS, -(1 << 63), (1 << 63) - 1 - ODD])
def test_a_row_outside_is_seen_wherever_it_is(count, bad, first):
    numbers = some_rows(count) + first
    assert all_within(numbers, ROWS, first)
    for place in {0, count // 2, max(0, count - 1)} if count else ():
        spoilt = numbers.clone()
        spoilt[place] = bad + first
        assert not all_within(spoilt, ROWS, first)
