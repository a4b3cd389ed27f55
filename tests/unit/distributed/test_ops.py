"""Reductions of several ranks' numbers, as a table."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from phalanx.distributed.ops import reduction_of
from phalanx.errors import ConfigError, UnsupportedError


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


@pytest.mark.parametrize("factor", [0.3, torch.tensor([0.3], dtype=torch.float64)])
def test_a_factor_scales_what_a_rank_gives_and_is_rounded_to_the_dtype(factor):
    reduction = reduction_of(ReduceOp.PREMUL_SUM(factor), torch.float16)
    given = torch.tensor([1.0, 10.0], dtype=torch.float16)
    assert torch.equal(reduction.scaled(given), torch.tensor([0.3, 3.0]).half())
    assert given.tolist() == [1.0, 10.0]


def test_ranks_may_bring_different_factors_and_are_in_the_same_operation():
    one, two = (reduction_of(ReduceOp.PREMUL_SUM(f), torch.float32) for f in (1.0, 2.0))
    assert one.number == two.number != reduction_of(ReduceOp.SUM, torch.float32).number


@pytest.mark.parametrize(
    ("op", "dtype", "kind", "words"),
    [
        ("sum", torch.float32, UnsupportedError, "`op` must be SUM, AVG, PRODUCT,"),
        (ReduceOp.PREMUL_SUM(2.0), torch.int64, ConfigError, "`op` must not scale torch.int64"),
        (
            ReduceOp.PREMUL_SUM(torch.tensor([1j])),
            torch.float32,
            ConfigError,
            "`op` must bring a real factor, but brings tensor([0.+1.j])",
        ),
        (ReduceOp.PREMUL_SUM, torch.float32, ConfigError, "`op` must bring a real factor"),
        (ReduceOp.BXOR, torch.bfloat16, ConfigError, "`op` must be arithmetic for torch.bfloat16"),
        (ReduceOp.MAX, torch.complex64, ConfigError, "`op` must not need an order for"),
        (ReduceOp.AVG, torch.bool, ConfigError, "that torch has for torch.bool, but is AVG"),
        (ReduceOp.SUM, torch.uint16, ConfigError, "that torch has for torch.uint16, but is SUM"),
    ],
)
def test_what_cannot_be_reduced_is_refused(op, dtype, kind, words):
    with pytest.raises(kind) as caught:
        reduction_of(op, dtype)
    assert words in str(caught.value)
