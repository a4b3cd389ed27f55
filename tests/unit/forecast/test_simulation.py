"""How long workers compute that share cores, beside closed forms and a schedule that is played."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.forecast import makespan_s, work_of_workers_s


def played(work, cores, tick=1e-3):
    """Let workers that are not done share the cores, a moment at a time."""
    left, ticks = np.array(work, dtype=float), 0
    while (left > 1e-9).any():
        active = left > 1e-9
        left[active] -= tick * min(1.0, cores / active.sum())
        ticks += 1
    return ticks * tick


@pytest.mark.parametrize(
    ("work", "cores", "seconds"),
    [
        ([2.0, 2.0, 2.0], 3, 2.0),
        ([2.0] * 6, 3, 4.0),  # twice as many as cores: twice as long
        ([2.0] * 5, 2, 5.0),
        ([1.0, 2.0, 4.0], 1, 7.0),  # one core does one thing after the other
        ([1.0, 2.0, 4.0], 2, 4.5),  # 1.5 until the first is done, 1 until the second, 2 alone
        ([3.0], 4, 3.0),
    ],
)
def test_workers_that_are_more_than_the_cores_share_them(work, cores, seconds):
    assert makespan_s(np.array([work]), cores) == pytest.approx(seconds)
    assert played(work, cores) == pytest.approx(seconds, abs=0.02)


def test_each_simulated_step_has_a_schedule_of_its_own():
    work = np.random.default_rng(0).exponential(size=(5, 7))
    found = makespan_s(work, 3)
    assert found == pytest.approx([played(each, 3) for each in work], abs=0.02)


@pytest.mark.parametrize("workers", [1, 2, 10, 100])
def test_the_slowest_of_n_exponentials_takes_the_nth_harmonic_number(workers):
    drawn = np.random.default_rng(1).exponential(size=(20_000, workers))
    expected = sum(1 / place for place in range(1, workers + 1))
    # The maximum's standard deviation is below pi / sqrt(6): five errors of the mean.
    assert makespan_s(drawn, workers).mean() == pytest.approx(expected, abs=5 * 1.3 / 20_000**0.5)


def test_microbatches_are_dealt_out_in_order_or_taken_by_whoever_is_free():
    seconds = np.array([[5.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 5.0]])
    dealt = work_of_workers_s(seconds, [2, 2, 1], has_queue=False)
    assert dealt.tolist() == [[6.0, 2.0, 1.0], [2.0, 2.0, 5.0]]
    queued = work_of_workers_s(seconds, [2, 2, 1], has_queue=True)
    assert np.sort(queued, axis=1).tolist() == [[2.0, 2.0, 5.0], [1.0, 2.0, 6.0]]
