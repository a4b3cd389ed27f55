"""Who may go on, as tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.staleness import Staleness


@pytest.mark.parametrize(
    ("bound", "clocks", "slowest"),
    [
        (0, [0, 0, 0], None),
        (0, [1, 0, 1], 1),
        (0, [1, 1, 2], None),
        (1, [1, 0, 0], None),
        (1, [2, 1, 0], 2),
        (3, [9, 6, 7], None),
        (3, [9, 5, 5], 1),
        (None, [9, 0, 0], None),
    ],
)
def test_a_worker_reads_when_nobody_is_more_than_the_bound_behind(bound, clocks, slowest):
    behind = Staleness(bound).waits_for(0, dict(enumerate(clocks)))
    assert (behind and behind.worker) == slowest


def test_who_is_alone_or_has_left_never_waits():
    assert Staleness(0).waits_for(0, {0: 7}) is None
    assert Staleness(0).waits_for(0, {1: 0, 2: 9}) is None


@given(st.integers(0, 5), st.lists(st.integers(0, 20), min_size=2, max_size=5))
def test_the_slowest_always_goes_on_so_somebody_moves(bound, clocks):
    slowest = clocks.index(min(clocks))
    by_worker = dict(enumerate(clocks))
    assert Staleness(bound).waits_for(slowest, by_worker) is None
    for worker in by_worker:
        if Staleness(bound).waits_for(worker, by_worker) is None:
            assert clocks[worker] - min(clocks) <= bound
            assert Staleness(bound).waits_for(worker, by_worker, ahead=1) is None
