"""Where the next module goes."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigError
from phalanx.plan import least_loaded


@pytest.mark.parametrize(
    ("candidates", "placed", "expected"),
    [
        ("ab", [], "a"),
        ("ab", [("a", 8)], "b"),
        ("ab", [("a", 8), ("b", 4), ("b", 4)], "a"),  # as many bytes, fewer modules
        ("ab", [("a", 8), ("b", 8)], "a"),
        ("abc", [("a", 0), ("b", 0)], "c"),  # modules without parameters are dealt out in turn
        ("ab", [("z", 1), ("a", 9), ("b", 10)], "a"),  # what lies elsewhere does not count
        ("b", [("b", 10**12), ("a", 0)], "b"),
    ],
)
def test_the_least_loaded_candidate(candidates: str, placed: list, expected: str) -> None:
    assert least_loaded(list(candidates), placed) == expected


def test_no_candidate() -> None:
    with pytest.raises(ConfigError, match="`candidates` must hold at least one device"):
        least_loaded([], [])
