"""The next module goes where fewest bytes are, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan import least_loaded

ABC = ["a", "b", "c"]
TABLE = [
    (["a"], [], "a"),
    (["a"], [("a", 10**9)], "a"),
    (ABC, [], "a"),
    (ABC, [("a", 4)], "b"),
    (ABC, [("a", 4), ("b", 4)], "c"),
    (ABC, [("a", 4), ("b", 3), ("c", 5)], "b"),
    (ABC, [("a", 2), ("a", 2), ("b", 5), ("c", 5)], "a"),  # bytes, not modules
    (ABC, [("a", 0)], "b"),  # nothing to choose by bytes: fewer modules
    (ABC, [("a", 0), ("b", 0), ("c", 0)], "a"),
    (ABC, [("a", 0), ("a", 0), ("b", 0), ("c", 0)], "b"),
    (ABC, [("a", 2), ("b", 1), ("b", 1), ("c", 2)], "a"),  # equal bytes: fewer modules, then first
    (ABC, [("b", 2), ("a", 1), ("a", 1), ("c", 9)], "b"),
    (ABC, [("z", 10**9), ("a", 1)], "b"),  # what lies elsewhere does not count
    (["c", "a"], [("a", 1), ("c", 1)], "c"),  # "earlier" is the order of the candidates
]


@pytest.mark.parametrize(("candidates", "placed", "expected"), TABLE)
def test_the_least_loaded_candidate(
    candidates: list[str], placed: list[tuple[str, int]], expected: str
) -> None:
    assert least_loaded(candidates, placed) == expected
    assert least_loaded(candidates, placed[::-1]) == expected  # who came first does not matter


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 5))
def test_greedy_placing_never_leaves_one_ahead_by_more_than_one_module(
    sizes: list[int], count: int
) -> None:
    placed: list[tuple[int, int]] = []
    for size in sizes:
        placed.append((least_loaded(range(count), placed), size))
    loads = [sum(size for where, size in placed if where == place) for place in range(count)]
    assert max(loads) - min(loads) <= max(sizes, default=0)
