"""Who may go on, as tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.staleness import Staleness, Verdict


@pytest.mark.parametrize(
    ("bound", "clocks", "goes", "slowest"),
    [
        (0, [0, 0, 0], True, 1),
        (0, [1, 0, 1], False, 1),
        (0, [1, 1, 2], True, 1),
        (1, [1, 0, 0], True, 1),
        (1, [2, 1, 0], False, 2),
        (3, [9, 6, 7], True, 1),
        (3, [9, 5, 5], False, 1),
        (None, [9, 0, 0], True, None),
    ],
)
def test_a_worker_reads_when_nobody_is_more_than_the_bound_behind(bound, clocks, goes, slowest):
    verdict = Staleness(bound).may_read(worker=0, clock_by_worker=dict(enumerate(clocks)))
    assert (verdict.may_go_on, verdict.slowest) == (goes, slowest)


def test_who_is_alone_or_has_left_never_waits():
    assert Staleness(0).may_read(worker=0, clock_by_worker={0: 7}).may_go_on
    assert Staleness(0).may_read(worker=0, clock_by_worker={1: 0, 2: 9}) == Verdict(True, None, 0)


@given(st.integers(0, 5), st.lists(st.integers(0, 20), min_size=2, max_size=5))
def test_the_slowest_always_goes_on_so_somebody_moves(bound, clocks):
    slowest = clocks.index(min(clocks))
    by_worker = dict(enumerate(clocks))
    assert Staleness(bound).may_read(worker=slowest, clock_by_worker=by_worker).may_go_on
    for worker in by_worker:
        judge = Staleness(bound)
        if judge.may_read(worker=worker, clock_by_worker=by_worker).may_go_on:
            assert clocks[worker] - min(clocks) <= bound
            assert judge.may_begin_round(worker=worker, clock_by_worker=by_worker).may_go_on
