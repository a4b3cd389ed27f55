"""Who computes which microbatch: each one once, whatever the order of asking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan import Shares


def taken(sizes: list[int], asking: list[int], *, stealing: bool = True) -> list[int | None]:
    shares = Shares(sizes, stealing=stealing)
    return [shares.take(replica) for replica in asking]


@pytest.mark.parametrize(
    ("sizes", "asking", "expected"),
    [
        ([2, 2], [0, 1, 0, 1, 0, 1], [0, 2, 1, 3, None, None]),
        ([3, 1], [1, 1, 0, 1, 0], [3, 2, 0, 1, None]),  # dry replica 1 takes from the end of 0's
        ([0, 3], [0, 1, 1, 1], [None, 0, 1, 2]),  # workload 0: switched off, steals nothing
        ([1, 2, 2], [0, 0, 0], [0, 2, 4]),  # of two with as many left, the first is robbed first
        ([], [], []),
    ],
)
def test_table(sizes: list[int], asking: list[int], expected: list[int | None]) -> None:
    assert taken(sizes, asking) == expected


def test_without_stealing_everybody_keeps_to_its_own() -> None:
    assert taken([1, 2], [0, 0, 1, 1, 1], stealing=False) == [0, None, 1, 2, None]


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    order=st.lists(st.integers(0, 4), max_size=80),
)
def test_every_microbatch_is_handed_out_once(sizes: list[int], order: list[int]) -> None:
    asking = [replica % len(sizes) for replica in order]
    asking += [replica for replica in range(len(sizes)) for _ in range(sum(sizes))]
    handed = [index for index in taken(sizes, asking) if index is not None]
    assert sorted(handed) == list(range(sum(sizes)))
