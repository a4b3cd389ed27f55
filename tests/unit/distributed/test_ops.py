"""Reductions of several ranks' numbers, as a table."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from phalanx.distributed.ops import reduction_of

has_factors = pytest.mark.skipif(
    not callable(ReduceOp.PREMUL_SUM), reason="this version of torch makes no PREMUL_SUM"
)


def reduced(op: object, dtype: torch.dtype, *rows: list[float]) -> list[float]:
    sources = [torch.tensor(row, dtype=dtype) for row in rows]
    out = torch.empty_like(sources[0])
    reduction_of(op, dtype)(sources, out)
    return out.tolist()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [7, 12]),
        (ReduceOp.AVG, [2, 4]),
        (ReduceOp.PRODUCT, [8, 60]),
        (ReduceOp.MIN, [1, 3]),
        (ReduceOp.MAX, [4, 5]),
        (ReduceOp.BAND, [0, 0]),
        (ReduceOp.BOR, [7, 7]),
        (ReduceOp.BXOR, [7, 2]),
    ],
)
def test_integers_are_reduced_exactly(op, expected):
    assert reduced(op, torch.int32, [1, 3], [2, 4], [4, 5]) == expected


def test_floats_are_added_in_the_order_of_ranks():
    assert reduced(ReduceOp.SUM, torch.float32, [1e8], [-1e8], [1.0]) == [1.0]
    assert reduced(ReduceOp.SUM, torch.float32, [1.0], [1e8], [-1e8]) == [0.0]


def test_halves_are_rounded_once():
    # 2048 + 1 is no float16, but 2048 + 1 + 1 is.
    assert reduced(ReduceOp.SUM, torch.float16, [2048.0], [1.0], [1.0]) == [2050.0]


def test_the_result_may_take_the_place_of_the_first_source():
    sources = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    reduction_of(ReduceOp.SUM, torch.float32)(sources, sources[0])
    assert sources[0].tolist() == [6.0]


def test_one_rank_is_its_own_sum():
    assert reduced(ReduceOp.AVG, torch.bfloat16, [3.0]) == [3.0]


@has_factors
@pytest.mark.parametrize("factor", [0.3, torch.tensor([0.3], dtype=torch.float64)])
def test_a_factor_scales_what_a_rank_gives_and_is_rounded_to_the_dtype(factor):
    reduction = reduction_of(ReduceOp.PREMUL_SUM(factor), torch.float16)
    given = torch.tensor([1.0, 10.0], dtype=torch.float16)
    assert torch.equal(reduction.scaled(given), torch.tensor([0.3, 3.0]).half())
    assert given.tolist() == [1.0, 10.0]


@has_factors
def test_ranks_may_bring_different_factors_and_are_in_the_same_operation():
    one, two = (reduction_of(ReduceOp.PREMUL_SUM(f), torch.float32) for f in (1.0, 2.0))
    assert one.number == two.number != reduction_of(ReduceOp.SUM, torch.float32).number
