"""A rank of a `phalanx` group is killed or halted inside each collective: the others are told whom.

Afterwards the survivors make a new group with a newcomer, in the same processes: the next case.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.world.arena import POINTS
from tests.chaos.ranks import CALLS, KINDS, SIZE, Case, Report, Troop

TOLD_WITHIN_S = 10.0  # of a promised 0.2: a busy machine may not run a survivor for long


@pytest.fixture(scope="module")
def troop() -> Iterator[Troop]:
    with Troop() as troop:
        yield troop


def offences(case: Case, hit_at_s: float, reports: dict[int, Report]) -> list[str]:
    """Say what is not as promised after a death."""
    found = []
    for rank, report in reports.items():
        if (report.error, report.rank) != ("PeerLost", case.victim):
            found.append(
                f"rank {rank} raised {report.error} of rank {report.rank}: {report.message}"
            )
        if f"Rank {case.victim} of {SIZE} must" not in report.message:
            found.append(f"rank {rank} was not told whom: {report.message}")
        if not 0 < report.raised_at_s - hit_at_s < TOLD_WITHIN_S:
            found.append(f"rank {rank} was told after {report.raised_at_s - hit_at_s:.3f} s")
        if report.num_right >= CALLS:
            found.append(f"rank {rank} went on alone")
        found += [f"rank {rank} still holds {what}" for what in report.left_over]
    return found


def some_victim(kind: str, point: str, number: int) -> int:
    """Return a rank that passes ``point``; the root is 1."""
    if point.startswith("piece") and point != "piece ended":
        if kind in ("broadcast", "scatter"):
            return 1  # only the root publishes
        if kind in ("reduce", "gather"):
            return 0 if number % 2 else 2  # only the root does not
    return number % SIZE


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_inside_a_collective_is_told_to_all_and_a_new_group_works(troop, kind):
    found = {}
    for number, point in enumerate(POINTS):
        if point == "result given" and kind != "all_reduce":
            continue
        victim = some_victim(kind, point, number)
        case = Case(kind=kind, victim=victim, point=point, passing=1 + number % 2)
        hit_at_s, reports = troop.go_through(case)
        wrong = offences(case, hit_at_s, reports)
        if wrong:
            found[case] = wrong
    assert found == {}


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "barrier"])
def test_each_rank_may_die(troop, kind, victim):
    case = Case(kind=kind, victim=victim, point="operation begun", passing=2)
    assert offences(case, *troop.go_through(case)) == []


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_halted_rank_is_named_at_the_timeout(troop, victim):
    case = Case("all_reduce", victim, "operation begun", deed="stop", timeout_s=1.0)
    _, reports = troop.go_through(case)
    assert {report.error for report in reports.values()} <= {"PeerTimeout", "GroupAborted"}
    assert {report.rank for report in reports.values()} == {victim}
    told = [report.message for report in reports.values() if report.error == "PeerTimeout"]
    assert told
    for message in told:
        assert f"Rank {victim} of {SIZE} did not come to all_reduce" in message
        assert "(its process is stopped)" in message


def test_control_a_death_that_nobody_looks_for_is_caught(troop):
    case = Case("all_reduce", 2, "operation begun", timeout_s=1.0, sabotage="deaths unseen")
    assert offences(case, *troop.go_through(case))


def test_control_a_survivor_that_does_not_wait_is_caught(troop):
    case = Case("broadcast", 1, "operation begun", sabotage="marks unread")
    # What it should have waited for may be there by chance.
    assert any(offences(case, *troop.go_through(case)) for _ in range(20))
