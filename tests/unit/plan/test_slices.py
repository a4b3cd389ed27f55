"""Sizes for k parts: by equal shares, by workload, round robin."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan import equal_sizes, read_workloads, workload_sizes

totals = st.integers(0, 2000)
counts = st.integers(1, 40)
workloads = st.lists(
    st.one_of(st.integers(0, 50), st.floats(0, 1e6, allow_subnormal=False)), min_size=1, max_size=12
).filter(any)


@given(totals, counts)
def test_equal_sizes_differ_by_one_at_most_larger_ones_first(total: int, parts: int) -> None:
    sizes = equal_sizes(total, parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes.count(0) == max(0, parts - total)


WEIGHTED = [
    (0, [1, 2], [0, 0]),
    (1, [1, 1], [1, 0]),
    (1, [1, 2], [0, 1]),
    (1, [0, 0, 5], [0, 0, 1]),
    (2, [1, 1, 1], [1, 1, 0]),
    (3, [2, 1], [2, 1]),
    (4, [1, 0], [4, 0]),
    (5, [1, 0, 1], [3, 0, 2]),  # equal remainders are served in order
    (6, [1, 1, 1, 1], [2, 2, 1, 1]),
    (9, [2, 1], [6, 3]),
    (10, [1, 1, 2], [3, 2, 5]),
    (10, [3, 3, 3, 1], [3, 3, 3, 1]),
    (20, [1] * 8, [3, 3, 3, 3, 2, 2, 2, 2]),
    (36, [1] * 7, [6, 5, 5, 5, 5, 5, 5]),  # MXNet: all the rest to the last
    (100, [0.5, 0.25, 0.25], [50, 25, 25]),
    (7, [1e-9, 1e-9], [4, 3]),
    (7, [1e300, 1e300], [4, 3]),  # their sum is more than a float holds
    (64, [1e-300, 1], [0, 64]),
]


@pytest.mark.parametrize(("total", "shares", "sizes"), WEIGHTED)
def test_workload_sizes_by_largest_remainder(
    total: int, shares: list[float], sizes: list[int]
) -> None:
    assert workload_sizes(total, shares) == sizes


@given(totals, workloads)
def test_workload_sizes_are_within_one_row_of_their_share(total: int, shares: list[float]) -> None:
    sizes = workload_sizes(total, shares)
    assert len(sizes) == len(shares)
    assert sum(sizes) == total
    whole = sum(map(Fraction, shares))
    # A quotient rounded to float may cross an integer, so a size may miss its bound by that
    # rounding.
    slack = Fraction(total) * Fraction(len(shares), 2**50)
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - Fraction(share) * total / whole) < 1 + slack
        assert size >= 0
        if share == 0:
            assert size == 0


@given(totals, counts, st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3)))
def test_equal_workloads_give_equal_sizes(total: int, parts: int, share: float) -> None:
    assert workload_sizes(total, [share] * parts) == equal_sizes(total, parts)


@given(
    totals, st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(-30, 30)
)
def test_only_the_ratio_of_workloads_counts(total: int, shares: list[int], power: int) -> None:
    """Scaling by a power of two is exact, so nothing but the ratio is left to count."""
    assert workload_sizes(total, [share * 2.0**power for share in shares]) == workload_sizes(
        total, shares
    )


# --- explicit sizes and shares --------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [np.array([2.0, 1.0]), torch.tensor([2.0, 1.0]), (share for share in (2, 1))]
)
def test_workloads_may_be_an_array_a_tensor_or_drawn(given):
    assert read_workloads(given, 2) == [2, 1]
