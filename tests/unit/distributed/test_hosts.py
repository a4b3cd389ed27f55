"""Who is on which host, as a table."""

from __future__ import annotations

import pytest

from phalanx.distributed.hosts import hosts_of, this_host


@pytest.mark.parametrize(
    ("places", "ranks", "leaders"),
    [
        ("a", ((0,),), (0,)),
        ("aaa", ((0, 1, 2),), (0,)),
        ("aab", ((0, 1), (2,)), (0, 2)),
        ("baab", ((0, 3), (1, 2)), (0, 1)),
        ("cba", ((0,), (1,), (2,)), (0, 1, 2)),
    ],
)
def test_hosts_come_in_the_order_of_their_lowest_ranks(places, ranks, leaders):
    hosts = hosts_of(places)
    assert hosts.ranks == ranks
    assert hosts.leaders == leaders
    assert hosts.size == len(places)
    assert [places[hosts.ranks[hosts.host_of(rank)][0]] for rank in range(len(places))] == [*places]


def test_a_process_can_play_another_host(monkeypatch):
    here = this_host()
    assert this_host() == here
    monkeypatch.setenv("PHALANX_HOST", "another")
    assert this_host() != here
