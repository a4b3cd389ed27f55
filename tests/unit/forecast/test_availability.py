"""What failures leave of a run, beside the closed forms for exponential gaps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phalanx.forecast import share_left_by_restarts, share_left_by_substitutes

NUM = 200_000


def gaps_s(mean_s):
    return np.random.default_rng(3).exponential(mean_s, NUM)


@pytest.mark.parametrize(
    ("mean_s", "restart_s", "checkpoint_s"), [(3600, 30, 60), (600, 60, 300), (50, 40, 100)]
)
def test_restarts_leave_what_dalys_formula_says(mean_s, restart_s, checkpoint_s):
    rate = 1 / mean_s
    whole = rate * checkpoint_s * math.exp(-rate * restart_s) / math.expm1(rate * checkpoint_s)
    found = share_left_by_restarts(gaps_s(mean_s), restart_s=restart_s, checkpoint_s=checkpoint_s)
    assert found == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("mean_s", "recovery_s", "restart_s", "speed"),
    [(3600, 0.1, 4.0, 0.5), (5, 0.2, 4.0, 0.5), (5, 0.2, 4.0, 0.0)],
)
def test_substitutes_leave_what_they_miss_and_what_is_done_again(
    mean_s, recovery_s, restart_s, speed
):
    missing = -math.expm1(-restart_s / mean_s)
    whole = (1 - (1 - speed) * missing) / (1 + recovery_s / mean_s)
    found = share_left_by_substitutes(
        gaps_s(mean_s), recovery_s=recovery_s, restart_s=restart_s, speed_without=speed
    )
    assert found == pytest.approx(whole, rel=0.01)


def test_what_never_comes_to_a_checkpoint_does_nothing():
    assert share_left_by_restarts(gaps_s(1.0), restart_s=1.0, checkpoint_s=1000.0) == 0.0
