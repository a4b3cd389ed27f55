"""Workers of parameter tables are killed: every acknowledged add is there, once and whole."""

from __future__ import annotations

import random

import pytest

from tests.chaos import ledger

pytestmark = pytest.mark.promise("acknowledged-adds-are-kept")


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.night)])
def test_the_books_are_right_after_kills(kills: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    result = ledger.soak(kills, seed)
    assert sum(result.deaths.values()) == kills
    assert min(result.adds[book] for book in ledger.BOOKS) > kills
    assert result.undone > 0 or kills < 100  # few kills may all miss the midst of an add
