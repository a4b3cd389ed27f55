"""Each collective of the backend ``phalanx`` gives what gloo gives, on one host and on several.

With 2, 3 and 4 ranks, and by day 3; several hosts are played on one, and each rank's is a
letter.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contracts import collectives as calls
from tests.multiprocess.ranks import Ranks

pytestmark = pytest.mark.promise("backend-gives-what-gloo-gives")

LARGE_ELEMENTS = (16 << 20) // 4 + 3


GATE = ("aaa", "aba")  # one host, and two whose ranks are mixed
BY_NIGHT = ("aa", "aaaa", "aab", "abaa", "aabb", "abc")
NIGHT = pytest.mark.night


@pytest.fixture(
    scope="module",
    params=[*GATE, *(pytest.param(each, marks=NIGHT) for each in BY_NIGHT)],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    hosts = request.param if len(set(request.param)) > 1 else ""
    with Ranks(len(request.param), hosts=hosts) as ranks:
        yield ranks


def check(answers: list[list[str]]) -> None:
    assert not any(answers), "\n".join(
        f"rank {rank}: {line}" for rank, lines in enumerate(answers) for line in lines
    )


@pytest.mark.parametrize(
    ("kind", "op"),
    [
        *(("all_reduce", op) for op in ("SUM", "AVG", "MAX")),
        *(pytest.param("all_reduce", op, marks=NIGHT) for op in ("PRODUCT", "MIN")),
        ("reduce", "SUM"),
        *(pytest.param("reduce", op, marks=NIGHT) for op in ("AVG", "PRODUCT", "MIN", "MAX")),
    ],
)
def test_a_reduction_is_gloos_and_in_rank_order(ranks, kind, op):
    dtypes = calls.FLOATS if op == "AVG" else (*calls.FLOATS, *calls.INTEGERS)
    check(ranks.run(calls.reductions, kind, op, dtypes))


def test_sums_of_bfloat16_are_rounded_once_and_to_the_nearest(ranks):
    check(ranks.run(calls.edges_of_bfloat16))


@pytest.mark.parametrize("op", ["BAND", *(pytest.param(op, marks=NIGHT) for op in ("BOR", "BXOR"))])
def test_a_bitwise_reduction_is_gloos(ranks, op):
    check(ranks.run(calls.reductions, "all_reduce", op, calls.INTEGERS))


@pytest.mark.parametrize("op", ["SUM", "AVG", pytest.param("MAX", marks=NIGHT)])
def test_a_scattered_reduction_is_in_rank_order(ranks, op):
    dtypes = calls.FLOATS if op == "AVG" else (*calls.FLOATS, torch.int64)
    check(ranks.run(calls.scattered_reductions, op, dtypes))


def test_a_sum_of_sparse_tensors_is_gloos(ranks):
    check(ranks.run(calls.sparse_sums))


@pytest.mark.parametrize("kind", calls.MOVES)
def test_what_moves_is_gloos_bit_for_bit(ranks, kind):
    check(ranks.run(calls.moves, kind, calls.MOVED))


def test_a_tensor_much_larger_than_the_slots_goes_through_whole(ranks):
    check(ranks.run(calls.very_large, LARGE_ELEMENTS))


def test_a_rank_alone_is_in_every_call_but_messages():
    with Ranks(1) as alone:
        for op in ("SUM", "AVG", "MAX"):
            for kind in ("all_reduce", "reduce"):
                check(alone.run(calls.reductions, kind, op, calls.FLOATS))
        for kind in sorted(set(calls.MOVES) - {"send and recv"}):
            check(alone.run(calls.moves, kind, calls.MOVED))
