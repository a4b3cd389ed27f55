"""Memory in one piece: what was compiled does what torch does, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.memory import all_finite, copy_to, laid_out_as
from tests.unit.memory.numbers import DTYPES, drawn

ODD = 7
LARGE = (64 << 10) + 5  # elements: beyond what is left to torch in any case


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("size", [0, 1, ODD, LARGE])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_bytes_are_copied_wherever_they_begin(way, dtype, size, start):
    source = drawn(torch.int32, size + 1).to(dtype)[1:]
    target = torch.zeros(start + size + 2, dtype=dtype)
    copy_to(source, target[start : start + size])
    assert torch.equal(target[start : start + size], source)
    assert not target[:start].any()
    assert not target[start + size :].any()


@pytest.mark.parametrize("rows", [130, 2**14 + 1])
def test_rows_are_copied_in_the_order_of_their_memory(way, rows):
    source = drawn(torch.float32, rows * 131).view(131, rows).T
    target = torch.zeros(131, rows).T
    copy_to(source, target)
    assert torch.equal(target, source)


FINITE = [0.0, -0.0, 1e-45, -5e-324, 1e38, -1.0]
NOT = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, ODD, 4097])
def test_what_is_not_finite_is_seen_wherever_it_is(needs_compiled, dtype, size):
    numbers = torch.tensor(FINITE, dtype=dtype).repeat(size)[:size]
    assert all_finite(numbers)
    for place in {0, size // 2, size - 1}:
        for bad in NOT:
            spoilt = numbers.clone()
            spoilt[place] = bad
            assert not all_finite(spoilt)
            assert not all_finite(spoilt.repeat(2, 2).T)


@pytest.mark.parametrize("numbers", [torch.ones(3, dtype=torch.int64), torch.empty(0), np.pi])
def test_integers_and_nothing_are_finite(needs_compiled, numbers):
    assert all_finite(torch.as_tensor(numbers))


@pytest.mark.parametrize("layout", ["sparse", "transposed", "other dtype"])
def test_gradients_are_laid_out_as_their_parameter(layout: str) -> None:
    like = torch.zeros(3, 4)
    plain = torch.arange(12.0).view(3, 4)
    gradient = {
        "sparse": plain.to_sparse(),
        "transposed": plain.t().contiguous().t(),
        "other dtype": plain.to(torch.float64),
    }[layout]
    found = laid_out_as(like, gradient)
    assert torch.equal(found, plain)
    assert found.stride() == like.stride()
