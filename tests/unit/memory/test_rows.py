"""Rows of a matrix: what was compiled does what torch does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.memory import PAST_CACHE_BYTES, MatrixRows, all_within, clamp_rows
from tests.products import in_pairs
from tests.unit.memory.numbers import DTYPES, drawn

ROWS, ODD = 1009, 7


def some_rows(count: int, seed: int = 0) -> Tensor:
    """Return row numbers; many are given more than once."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, min(ROWS, 2 * count + 1), (count,), generator=draw)


@in_pairs("dtype, cols, count", DTYPES, [1, 3, 64, 333], [0, 1, ODD, 65, 4097])
def test_rows_are_taken_saved_and_added_to(way, dtype, cols, count):
    values, numbers = drawn(dtype, ROWS, cols), some_rows(count)
    delta, before = drawn(dtype, count, cols, seed=1), values.clone()
    owned = MatrixRows(values)

    out = torch.empty(count, cols, dtype=dtype)
    owned.take(numbers, out)
    assert torch.equal(out, before[numbers])

    for past in (False, True):
        record = torch.zeros(count + ODD, cols, dtype=dtype)
        owned.save(numbers, MatrixRows(record), ODD - 2, past=past)
        assert torch.equal(record[ODD - 2 : count + ODD - 2], before[numbers])
        assert not record[: ODD - 2].any()
        assert not record[count + ODD - 2 :].any()

    owned.add(numbers, delta)
    for number, row in zip(numbers.tolist(), delta, strict=True):
        before[number] += row  # one after the other: what a row is given twice is added twice
    if dtype == torch.bfloat16:  # torch rounds the sum of many repeats once, that of few each time
        assert torch.allclose(values.float(), before.float(), rtol=0.02, atol=0.2)
    else:
        assert torch.equal(values, before)


@pytest.mark.parametrize("cols", [3, 4, 333])
@pytest.mark.parametrize("start", [0, 1])  # of vectors, or not
def test_more_than_caches_hold_is_taken_as_well(way, cols, start):
    count = PAST_CACHE_BYTES // (4 * cols) + ODD
    values, numbers = drawn(torch.float32, ROWS, cols), some_rows(count)
    room = torch.zeros(start + count * cols + 1)
    MatrixRows(values).take(numbers, room[start : start + count * cols].view(count, cols))
    assert torch.equal(room[start:-1].view(count, cols), values[numbers])
    assert not room[:start].any()
    assert not room[-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_and_deltas_may_lie_apart(way, dtype):
    values = drawn(dtype, ROWS, 5)
    before, numbers = values.clone(), torch.arange(2 * ODD)[::2]
    delta = drawn(dtype, 5, ODD, seed=1).T
    out = torch.empty(ODD, 5, dtype=dtype)
    owned = MatrixRows(values)
    owned.take(numbers, out)
    owned.add(numbers.contiguous(), delta)
    assert torch.equal(out, before[numbers])
    assert torch.equal(values, before.index_add_(0, numbers, delta))


@pytest.mark.parametrize("scale", [1, -0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, ODD, 65, 999])
def test_rows_of_a_delta_may_be_picked(way, dtype, count, scale):
    values, numbers = drawn(dtype, ROWS, 5), some_rows(count)
    delta, places = drawn(dtype, ROWS, 5, seed=1), some_rows(count, seed=2)
    one, other = MatrixRows(values), MatrixRows(values.clone())
    scale = scale if dtype.is_floating_point else int(scale) or 3
    for few in (1, count):  # the second needs more room than the first
        one.add(numbers[:few], delta, scale, places[:few])
        other.add(numbers[:few], delta[places[:few]], scale)
    assert torch.equal(values, other.values)


def test_a_delta_may_be_scaled(way):
    values, numbers = drawn(torch.float32, ROWS, 5), some_rows(ODD)
    delta = drawn(torch.float32, ODD, 5, seed=1)
    wanted = values.clone().index_add_(0, numbers, delta, alpha=-0.3)
    MatrixRows(values).add(numbers, delta, -0.3)
    assert torch.equal(values, wanted)


def test_integers_wrap_around(way):
    values = torch.full((2, 1), torch.iinfo(torch.int32).max, dtype=torch.int32)
    MatrixRows(values).add(torch.tensor([1]), torch.ones(1, 1, dtype=torch.int32))
    assert values.tolist() == [[2**31 - 1], [-(2**31)]]


def test_numbers_that_were_changed_behind_our_back_reach_no_other_memory(needs_compiled):
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
def test_a_row_outside_is_seen_wherever_it_is(way, count, bad, first):
    numbers = some_rows(count) + first
    assert all_within(numbers, ROWS, first)
    assert all_within(numbers.repeat_interleave(2)[::2], ROWS, first)
    for place in {0, count // 2, max(0, count - 1)} if count else ():
        spoilt = numbers.clone()
        spoilt[place] = bad + first
        assert not all_within(spoilt, ROWS, first)
        assert not all_within(spoilt.repeat_interleave(2)[::2], ROWS, first)


@pytest.mark.parametrize("first", [0, ODD])
@pytest.mark.parametrize("count", [0, 1, ODD, 1001])
def test_rows_are_brought_within(way, count, first):
    numbers = torch.arange(count) * 7 - 9
    for given in (numbers + first, (numbers + first).repeat_interleave(2)[::2]):
        found = torch.empty(count, dtype=torch.int64)
        clamp_rows(given, ODD, found, first)
        assert torch.equal(found, numbers.clamp(0, ODD - 1))


@pytest.mark.parametrize("count", [0, 1, ODD, 1001])
def test_rows_of_a_part_keep_the_numbers_of_the_whole(way, count):
    whole, numbers = drawn(torch.float32, 2 * ROWS, 5), some_rows(count) + ROWS
    for given in (numbers, numbers.repeat_interleave(2)[::2]):
        out = torch.empty(count, 5)
        MatrixRows(whole[ROWS:]).take(given, out, ROWS)
        assert torch.equal(out, whole[numbers])
