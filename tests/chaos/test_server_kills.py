"""200 servers of hosts are killed under 8 clients: every add is there once, and hosts come back."""

from __future__ import annotations

import random

import pytest

from tests.chaos import server_kills

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")

KILLS = 200


@pytest.mark.slow
def test_the_books_of_three_hosts_are_right_after_200_kills(tmp_path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    result = server_kills.soak(KILLS, seed, tmp_path)
    print(result)
    assert sum(result.kills.values()) == KILLS
    assert min(result.kills[host] for host in range(server_kills.HOSTS)) > KILLS // 10
    assert len(result.both_s) == KILLS // server_kills.BOTH_EVERY
    assert result.p50_s <= 1.0
