"""A rank is killed or halted in a group of several hosts: all are told whom, on every host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.ranks import SIZE, Case, RunResult, Troop
from tests.chaos.test_collectives import TOLD_WITHIN_S

pytestmark = pytest.mark.promise("every-wait-ends")

HOSTS = "aab"


def offences(case: Case, hit_at_s: float, reports: dict[int, RunResult]) -> list[str]:
    """Say what is not as promised after a death: who it was is told, on other hosts not in what."""
    found = []
    for rank, report in reports.items():
        if (report.error, report.rank) != ("PeerLost", case.victim):
            found.append(f"rank {rank} raised {report.error} of {report.rank}: {report.message}")
        if f"rank {case.victim} of {SIZE} " not in report.message.lower():
            found.append(f"rank {rank} was not told whom: {report.message}")
        if not 0 < report.raised_at_s - hit_at_s < TOLD_WITHIN_S:
            found.append(f"rank {rank} was told after {report.raised_at_s - hit_at_s:.3f} s")
        found += [f"rank {rank} still holds {what}" for what in report.left_over]
    return found


@pytest.fixture(scope="module")
def troop() -> Iterator[Troop]:
    with Troop() as troop:
        yield troop


# Rank 0 is the first of its host, 1 is not, 2 is alone on its own.
PLACES = [
    (0, "operation begun"),
    (0, "exchange begun"),
    (1, "operation begun"),
    (2, "exchange begun"),
]


def deaths() -> list[object]:
    """Every call and place; in the gate all of `all_reduce`, and of the others one by turns."""
    return [
        pytest.param(
            kind, *place, marks=[] if kind == "all_reduce" or turn == at else pytest.mark.night
        )
        for turn, kind in enumerate(["all_reduce", "reduce_scatter", "broadcast", "all_gather"])
        for at, place in enumerate(PLACES)
    ]


@pytest.mark.parametrize(("kind", "victim", "point"), deaths())
def test_a_death_is_told_on_all_hosts_and_a_new_group_works(troop, kind, victim, point):
    case = Case(kind=kind, victim=victim, point=point, hosts=HOSTS)
    assert not offences(case, *troop.go_through(case))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_where_ranks_talk_straight_is_told(troop, victim):
    case = Case(kind="all_to_all", victim=victim, point="exchange begun", hosts=HOSTS)
    assert not offences(case, *troop.go_through(case))


@pytest.mark.parametrize("victim", [1, 2])
def test_who_is_halted_is_named_on_all_hosts_at_the_timeout(troop, victim):
    point = "operation begun" if victim == 1 else "exchange begun"
    case = Case(
        kind="all_reduce", victim=victim, point=point, deed="stop", timeout_s=2.0, hosts=HOSTS
    )
    _, reports = troop.go_through(case)
    for rank, report in reports.items():
        if rank != victim:
            assert report.error in ("PeerTimeout", "GroupAborted"), report
            assert report.rank == victim, report


@pytest.mark.parametrize("deed", ["kill", "stop"])
def test_who_is_hit_while_its_bytes_travel_is_named(troop, deed):
    case = Case(
        kind="all_reduce",
        victim=2,
        point="exchange begun",
        passing=2,
        after_s=0.01,
        length=5_000_001,
        deed=deed,
        timeout_s=20.0 if deed == "kill" else 2.0,
        hosts=HOSTS,
    )
    _, reports = troop.go_through(case)
    for rank, report in reports.items():
        if rank != case.victim:
            errors = ("PeerLost",) if deed == "kill" else ("PeerTimeout", "GroupAborted")
            assert report.error in errors, report
            assert report.rank == case.victim, report


def test_a_planted_bug_is_noticed(troop):
    case = Case(
        kind="all_reduce",
        victim=1,
        point="operation begun",
        hosts=HOSTS,
        tells=False,
    )
    assert offences(case, *troop.go_through(case))
