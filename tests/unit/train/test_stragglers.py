"""Which replica is slow, told by its own work."""

from __future__ import annotations

from dataclasses import replace

from phalanx import Span, StepDone, Stragglers
from tests.unit.callbacks.events import epoch_done, step_done


def step(work_s: tuple[float, ...], shares: tuple[int, ...]) -> StepDone:
    return step_done(
        replicas=len(shares), shares=shares, work_s=work_s, busy_s=(1.0,) * len(shares)
    )


def test_the_slow_one_is_named_by_its_pace_and_not_by_its_share() -> None:
    stragglers = Stragglers()
    for _ in range(5):
        stragglers(step((0.4, 0.1, 0.3), (4, 4, 12)))
    [found] = stragglers.report()
    assert (found.replica, round(found.times_slower, 6)) == (0, 4.0)
    assert "replica 0 takes 4.0 times as long" in str(found)


def test_rows_that_are_dear_in_a_small_slice_make_nobody_slow() -> None:
    stragglers = Stragglers()
    stragglers(step((0.10, 0.11), (16, 8)))  # what a slice costs is not what its rows cost
    assert stragglers.report() == []
    stragglers(step((0.10, 0.33), (16, 8)))
    stragglers(step((0.10, 0.33), (16, 8)))
    assert [found.replica for found in stragglers.report()] == [1]


def test_who_takes_fewer_microbatches_because_of_its_pace_is_slow() -> None:
    spans = tuple(
        Span(replica=int(place == 3), microbatch=place, start_s=0.0, stop_s=1.0)
        for place in range(4)
    )
    stragglers = Stragglers()
    stragglers(replace(step((0.3, 0.3), (12, 4)), spans=spans))
    assert [found.replica for found in stragglers.report()] == [1]


def test_nobody_is_slow_alone_or_once() -> None:
    stragglers = Stragglers()
    stragglers(step((9.0,), (4,)))
    assert stragglers.report() == []
    for work_s in [(0.1, 0.1), (0.1, 0.9), (0.1, 0.1)]:  # a resize forgets what was before
        stragglers(step(work_s, (4, 4)))
    assert stragglers.report() == []


def test_a_replica_without_rows_is_left_out_and_other_events_too() -> None:
    stragglers = Stragglers()
    stragglers(epoch_done())
    assert stragglers.report() == []
    stragglers(step((0.1, 0.0, 0.1), (4, 0, 4)))
    assert stragglers.report() == []
