"""200 workers of parameter tables are killed: every acknowledged add is there, once and whole."""

from __future__ import annotations

import random

import pytest

from tests.chaos import ledger

KILLS = 200


@pytest.mark.slow
def test_the_books_are_right_after_200_kills() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    result = ledger.soak(KILLS, seed)
    assert sum(result.deaths.values()) == KILLS
    assert min(result.adds[book] for book in ledger.BOOKS) > KILLS
    assert result.undone > 0
