"""The backend `phalanx` on several hosts, played on one: gloo's results, bits in host order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conformance import collectives as calls
from tests.conformance.test_backend import LARGE_ELEMENTS, check
from tests.conformance.test_backend_clients import over_both
from tests.multiprocess.spawn import Ranks


@pytest.fixture(scope="module", params=["aab", "aabb", "abc", "abaa"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(len(request.param), hosts=request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", ["all_reduce", "reduce"])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_a_reduction_is_gloos_and_in_host_order(ranks, kind, op):
    dtypes = calls.FLOATS if op == "AVG" else (*calls.FLOATS, *calls.INTEGERS)
    check(ranks.run(calls.reductions, kind, op, dtypes))


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_a_bitwise_reduction_is_gloos(ranks, op):
    check(ranks.run(calls.reductions, "all_reduce", op, calls.INTEGERS))


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_a_scattered_reduction_is_in_host_order(ranks, op):
    dtypes = calls.FLOATS if op == "AVG" else (*calls.FLOATS, torch.int64)
    check(ranks.run(calls.scattered_reductions, op, dtypes))


def test_a_sum_of_scaled_numbers_is_the_plain_one(ranks):
    check(ranks.run(calls.scaled_sums, calls.FLOATS))


def test_a_group_can_be_split(ranks):
    check(ranks.run(calls.splits))


@pytest.mark.parametrize("kind", calls.MOVES)
def test_what_moves_is_gloos_bit_for_bit(ranks, kind):
    check(ranks.run(calls.moves, kind, calls.MOVED))


def test_a_tensor_much_larger_than_a_piece_goes_through_whole(ranks):
    check(ranks.run(calls.very_large, LARGE_ELEMENTS))


@pytest.mark.parametrize(
    "name", ["DDP with unused parameters", "DDP without sync", "FSDP2", "objects"]
)
def test_a_client_gives_what_it_gives_over_gloo(ranks, name):
    for ours, gloos in ranks.run(over_both, name):
        for key, numbers in ours.items():
            assert numbers == pytest.approx(gloos[key], rel=1e-12, abs=1e-12), key
