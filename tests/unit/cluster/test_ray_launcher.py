"""Which rank runs where, and what is refused before Ray is asked for anything."""

from __future__ import annotations

import sys

import pytest

from phalanx.cluster import on_ray
from phalanx.cluster.ray_launcher import plan_ranks
from phalanx.errors import ConfigError, UnsupportedError
from tests.multiprocess.hosts import free_port


@pytest.mark.parametrize(
    ("nodes", "planned"),
    [
        ("a", ["0a 0/1 0/1"]),
        ("aa", ["0a 0/2 0/1", "1a 1/2 0/1"]),
        ("aba", ["0a 0/2 0/2", "2a 1/2 0/2", "1b 0/1 1/2"]),
        ("cab", ["0c 0/1 0/3", "1a 0/1 1/3", "2b 0/1 2/3"]),
    ],
)
def test_ranks_are_numbered_node_by_node(nodes, planned):
    found = plan_ranks(list(nodes))
    assert [
        f"{each.bundle}{each.node} {each.local_rank}/{each.num_local} "
        f"{each.node_rank}/{each.num_nodes}"
        for each in found
    ] == planned


def test_a_rank_is_told_what_torchrun_would_tell_it_and_its_node():
    place = plan_ranks(["a", "b", "a"])[1]
    assert place.variables(1, 3) == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "PHALANX_HOST": "ray-a",
    }


def test_without_ray_the_way_out_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"Say `pip install 'phalanx\[ray\]'`\."):
        on_ray(print)


def test_an_address_where_nobody_answers_is_refused_at_once():
    pytest.importorskip("ray")
    port = free_port()
    with pytest.raises(ConfigError, match=f"nothing answers at localhost:{port} "):
        on_ray(print, address=f"localhost:{port}")
