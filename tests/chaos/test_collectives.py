"""A rank of a `phalanx` group is killed or halted inside each collective: the others are told whom.

Afterwards all who are left make a new group, in the same processes: the next case.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.distributed.shared_memory import POINTS
from tests.chaos.calls import WITH_POINTS
from tests.chaos.ranks import CALLS, SIZE, Case, RunResult, Troop

pytestmark = pytest.mark.promise("every-wait-ends")

TOLD_WITHIN_S = 10.0  # of a promised 0.2: a busy machine may not run a survivor for long
HALTED_S = 1.5  # a timeout that no busy machine reaches by itself


@pytest.fixture(scope="module")
def troops() -> Iterator[list[Troop]]:
    """One for each rank that may be hit: waits for somebody who is halted go on side by side."""
    with Troop() as first, Troop() as second, Troop() as third:
        yield [first, second, third]


@pytest.fixture
def troop(troops: list[Troop]) -> Troop:
    return troops[0]


def offences_of(rank: int, report: RunResult) -> list[str]:
    """Say what is not as promised after any failure."""
    found = [f"rank {rank} still holds {what}" for what in report.left_over]
    if report.num_right >= CALLS:
        found.append(f"rank {rank} went on alone")
    return found


def offences(case: Case, hit_at_s: float, reports: dict[int, RunResult]) -> list[str]:
    """Say what is not as promised after a death."""
    found = []
    for rank, report in reports.items():
        found += offences_of(rank, report)
        if (report.error, report.rank) != ("PeerLost", case.victim):
            found.append(
                f"rank {rank} raised {report.error} of rank {report.rank}: {report.message}"
            )
        whom = f"Rank {case.victim} of {SIZE} has died"
        if whom not in report.message or f"of each: rank {case.victim}: " not in report.message:
            found.append(f"rank {rank} was not told whom, and in what: {report.message}")
        if not 0 < report.raised_at_s - hit_at_s < TOLD_WITHIN_S:
            found.append(f"rank {rank} was told after {report.raised_at_s - hit_at_s:.3f} s")
    return found


def halting_offences(case: Case, hit_at_s: float, reports: dict[int, RunResult]) -> list[str]:
    """Say what is not as promised after somebody was halted, and woken when the others had failed.

    Of the others some wait for the halted rank, the rest for those; the first to run out of time
    names it, with what it was in.
    """
    found = []
    for rank, report in reports.items():
        found += offences_of(rank, report)
        if report.error not in ("PeerTimeout", "GroupAborted") or report.rank != case.victim:
            found.append(
                f"rank {rank} raised {report.error} of rank {report.rank}: {report.message}"
            )
    others = [report for rank, report in reports.items() if rank != case.victim]
    late = [report for report in others if report.error == "PeerTimeout"]
    if not late:
        found.append("nobody ran out of time")
    for report in late:
        if f"of {SIZE} did not come to" not in report.message:
            found.append(f"this is no timeout: {report.message}")
        if report.message.split("of each: ")[1].count("(its process is stopped)") != 1:
            found.append(f"not told who is halted: {report.message}")
        if report.raised_at_s - hit_at_s < case.timeout_s - 0.5:
            found.append("somebody lost patience early")
    return found


def points_of(kind: str) -> list[str]:
    reduces_in_parts = kind in ("all_reduce", "reduce", "unwaited all_reduces")
    return [point for point in POINTS if point != "result given" or reduces_in_parts]


def deaths() -> list[object]:
    """Every point of every collective; in the gate all of `all_reduce`, and of others by turns."""
    cases = []
    for turn, kind in enumerate(WITH_POINTS):
        points = list(enumerate(points_of(kind)))
        some = points if kind == "all_reduce" else points[turn % 3 :: 3]
        rest = [each for each in points if each not in some]
        cases.append(pytest.param(kind, some, id=kind))
        if rest:
            cases.append(pytest.param(kind, rest, id=f"{kind}, others", marks=pytest.mark.night))
    return cases


@pytest.mark.parametrize(("kind", "points"), deaths())
def test_a_death_inside_a_collective_is_told_to_all_and_a_new_group_works(troop, kind, points):
    found = {}
    for number, point in points:
        victim = number % SIZE
        case = Case(kind=kind, victim=victim, point=point, passing=1 + number % 2)
        wrong = offences(case, *troop.go_through(case))
        if wrong:
            found[case] = wrong
    assert found == {}


def go_halting(troops: list[Troop], cases: list[Case]) -> dict[Case, list[str]]:
    """Go through ``cases`` with troops side by side; return what was not as promised."""

    def go(troop: Troop, some: list[Case]) -> dict[Case, list[str]]:
        return {case: halting_offences(case, *troop.go_through(case)) for case in some}

    shares = [cases[number :: len(troops)] for number in range(len(troops))]
    with ThreadPoolExecutor(len(troops)) as pool:
        found = pool.map(go, troops, shares)
    return {case: wrong for share in found for case, wrong in share.items() if wrong}


@pytest.mark.parametrize(
    "kind",
    [
        "all_reduce",
        "barrier",
        *(pytest.param(k, marks=pytest.mark.night) for k in ("broadcast", "gather")),
    ],
)
def test_a_halted_rank_is_named_at_the_timeout_and_fails_when_it_goes_on(troops, kind):
    pids = [troop.pids for troop in troops]
    cases = [
        Case(kind, victim, "operation begun", deed="stop", passing=1 + victim, timeout_s=HALTED_S)
        for victim in range(SIZE)
    ]
    assert go_halting(troops, cases) == {}
    assert [troop.pids for troop in troops] == pids  # the same processes go on


@pytest.mark.night
@pytest.mark.parametrize("kind", WITH_POINTS)
def test_each_rank_may_be_halted_at_each_point(troops, kind):
    cases = [
        Case(kind, victim, point, deed="stop", timeout_s=HALTED_S)
        for victim, point in itertools.product(range(SIZE), points_of(kind))
    ]
    assert go_halting(troops, cases) == {}


def test_processes_end_with_the_troop():
    with Troop() as troop:
        pids = troop.pids
        case = Case("broadcast", 1, "piece written")
        assert offences(case, *troop.go_through(case)) == []
        pids += troop.pids
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
