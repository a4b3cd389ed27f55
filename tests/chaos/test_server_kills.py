"""Servers of hosts are killed under 8 clients: every add is there once, and hosts come back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos import server_kills

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.night)])
def test_the_books_of_three_hosts_are_right_after_kills(kills: int, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    result = server_kills.soak(kills, seed, tmp_path)
    print(result)
    assert sum(result.kills.values()) == kills
    assert len(result.kills) == server_kills.HOSTS
    assert result.p50_s <= 1.0
