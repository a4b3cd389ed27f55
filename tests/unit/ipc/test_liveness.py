"""Waits that end: with what was waited for, with a death that is noticed, or at the deadline."""

from __future__ import annotations

import pytest

from phalanx.clock import now_s
from phalanx.errors import PeerLost, PeerTimeout
from phalanx.ipc import LivenessTimer, late_peers, wait_until

LONG_S = 30.0


def test_a_death_that_comes_later_ends_the_wait():
    checks: list[float] = []

    def check() -> None:
        checks.append(now_s())
        if len(checks) == 3:
            raise PeerLost("dead", 1)

    with pytest.raises(PeerLost):
        wait_until(lambda: False, LONG_S, check)


def test_who_comes_at_the_deadline_has_come():
    asked: list[bool] = []

    def ready() -> bool:
        asked.append(True)
        return len(asked) > 1  # after the deadline's check

    assert wait_until(ready, 0.0)
    assert len(asked) == 2


def test_a_timer_is_due_once_per_interval():
    timer = LivenessTimer()
    assert [timer.due() for _ in range(3)] == [True, False, False]
    assert wait_until(timer.due, LONG_S)


def test_the_error_names_who_did_not_come_and_who_did():
    error = late_peers("Rank", [1, 2], 4, "the barrier", 0.5, came=[0, 3], slowest=2, more="Go.")
    assert isinstance(error, PeerTimeout)
    assert error.rank == 2
    assert str(error) == (
        "Ranks 1–2 of 4 did not come to the barrier within 0.5 s; ranks 0 and 3 did. Go."
    )
