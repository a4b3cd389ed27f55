"""Rows of a matrix: C does what torch does, bit for bit, where rows are added one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.memory import MatrixRows, all_within
from tests.products import in_pairs
from tests.unit.memory.numbers import DTYPES, drawn

ROWS, ODD = 1009, 7

pytestmark = pytest.mark.usefixtures("needs_compiled")


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


@in_pairs(
    "dtype, cols, count, scale", DTYPES, [1, 3, 64, 333], [0, 1, ODD, 65, 999], [1.0, -0.5, 0.3]
)
def test_rows_are_taken_and_added_to(dtype, cols, count, scale):
    scale = scale if dtype.is_floating_point else 1.0
    values, numbers = drawn(dtype, ROWS, cols), some_rows(count)
    delta, before = drawn(dtype, count, cols, seed=1), values.clone()
    owned = MatrixRows(values)
    out = torch.empty(count, cols, dtype=dtype)
    owned.take(numbers, out)
    assert torch.equal(out, before[numbers])
    owned.add(numbers, delta, scale)
    assert torch.equal(values, added(before, numbers, delta, scale))


def test_integers_wrap_around():
    values = torch.full((2, 1), torch.iinfo(torch.int32).max, dtype=torch.int32)
    MatrixRows(values).add(torch.tensor([1]), torch.ones(1, 1, dtype=torch.int32))
    assert values.tolist() == [[2**31 - 1], [-(2**31)]]


def test_numbers_that_were_changed_behind_our_back_reach_no_other_memory():
    """The neighbours are what lies before and after the matrix."""
    whole = torch.zeros(9, 3)
    values, numbers = whole[3:6], torch.tensor([-5, 1, 7, 1 << 60])
    owned, out = MatrixRows(values), torch.full((4, 3), -1.0)
    owned.add(numbers, torch.ones(4, 3))
    owned.take(numbers, out)
    assert whole[:, 0].tolist() == [0, 0, 0, 1, 1, 2, 0, 0, 0]
    assert out[:, 0].tolist() == [1, 1, 2, 2]


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
