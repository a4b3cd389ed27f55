"""Who is on which host, as a table."""

from __future__ import annotations

import pytest

from phalanx.distributed.job_store import ranks_by_host, this_host


@pytest.mark.parametrize(
    ("places", "ranks"),
    [
        ("a", [[0]]),
        ("aaa", [[0, 1, 2]]),
        ("aab", [[0, 1], [2]]),
        ("baab", [[0, 3], [1, 2]]),
        ("cba", [[0], [1], [2]]),
    ],
)
def test_hosts_come_in_the_order_of_their_lowest_ranks(places, ranks):
    assert ranks_by_host(places) == ranks


def test_a_process_can_play_another_host(monkeypatch):
    here = this_host()
    assert this_host() == here
    monkeypatch.setenv("PHALANX_HOST", "another")
    assert this_host() != here
