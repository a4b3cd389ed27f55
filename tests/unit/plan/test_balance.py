"""Workloads that follow measured speeds, in simulation: the times are drawn here, none is taken."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.parallel.balancing import Balancing
from phalanx.plan import Balancer, Decision, balance, fixed_workloads, workload_sizes

TOTAL = 128
Costs = Callable[[int], Sequence[float]]


def run(
    balancer: Balancer,
    costs: Sequence[float] | Costs,
    *,
    steps: int,
    total: int = TOTAL,
    overhead: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Let a balancer share out batches; return each step's rows, with those of a next one.

    A slice takes ``overhead`` plus its rows times the device's cost, and what is measured is that
    times a number around 1.
    """
    draw = random.Random(seed)
    shares = [workload_sizes(total, balancer.workloads)]
    for step in range(steps):
        rows = shares[-1]
        now = costs(step) if callable(costs) else costs
        seconds = [
            (overhead + count * cost) * max(0.05, draw.gauss(1, noise)) if count else 0.0
            for count, cost in zip(rows, now, strict=True)
        ]
        shares.append(workload_sizes(total, balancer.observe(rows, seconds)))
    return shares


def time_of(rows: Sequence[int], costs: Sequence[float], overhead: float = 0.0) -> float:
    return max(
        overhead + count * cost if count else 0.0 for count, cost in zip(rows, costs, strict=True)
    )


def ideal_time(costs: Sequence[float], *, overhead: float = 0.0, total: int = TOTAL) -> float:
    """Return the time of the best split, if rows could be cut."""
    return overhead + total / sum(1 / cost for cost in costs)


# --- equal devices --------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_equal_devices_keep_equal_shares_however_noisy_their_times(num_devices, noise):
    for seed in range(8):
        shares = run(Balancer(num_devices), [1.0] * num_devices, steps=150, noise=noise, seed=seed)
        assert shares == [shares[0]] * 151, f"seed {seed}"


def test_one_late_step_in_thirty_moves_nothing():
    draw = random.Random(3)

    def costs(_: int) -> list[float]:
        return [6.0 if draw.random() < 1 / 30 else 1.0 for _ in range(2)]

    shares = run(Balancer(2), costs, steps=300, noise=0.1, seed=3)
    assert shares == [[64, 64]] * 301


def test_two_late_steps_in_a_row_move_nothing_but_three_do():
    def costs(late: int) -> Costs:
        return lambda step: [5.0 if 40 <= step < 40 + late else 1.0, 1.0]

    assert run(Balancer(2), costs(2), steps=80, noise=0.05) == [[64, 64]] * 81
    assert run(Balancer(2), costs(3), steps=43, noise=0.05)[-1] != [64, 64]


def test_what_slows_all_devices_at_once_moves_nothing():
    shares = run(Balancer(2), lambda step: [1.0 + step % 7] * 2, steps=60, noise=0.05)
    assert shares == [[64, 64]] * 61


def test_a_difference_that_is_not_worth_moving_rows_for_moves_none():
    assert run(Balancer(2), [1.0, 1.04], steps=100) == [[64, 64]] * 101
    assert run(Balancer(2, least_gain=0.01), [1.0, 1.04], steps=100)[-1] == [65, 63]


def test_a_small_difference_is_found_behind_the_noise_in_time():
    shares = run(Balancer(2), [1.0, 1.3], steps=100, noise=0.1)
    assert time_of(shares[-1], [1.0, 1.3]) <= 1.05 * ideal_time([1.0, 1.3])


# --- unequal devices ------------------------------------------------------------------------------

UNEQUAL = [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0, 3.0), (2.0, 3.0, 1.0), (1.0, 10.0)]


@pytest.mark.parametrize("costs", UNEQUAL)
@pytest.mark.parametrize("overhead", [0.0, 0.25, 0.5])
def test_ten_steps_bring_a_slow_device_within_a_tenth_of_the_ideal(costs, overhead):
    """The overhead of a step is given in terms of a device's time for an even share."""
    extra = overhead * TOTAL / len(costs)
    for seed in range(10):
        shares = run(Balancer(len(costs)), costs, steps=10, overhead=extra, noise=0.02, seed=seed)
        limit = 1.1 * ideal_time(costs, overhead=extra)
        assert time_of(shares[-1], costs, extra) <= limit, f"seed {seed}: {shares}"


def test_a_device_three_times_slower_gets_a_third_of_the_rows_in_spite_of_noise():
    for seed in range(20):
        shares = run(Balancer(2), [1.0, 3.0], steps=10, noise=0.1, seed=seed)
        assert time_of(shares[-1], [1.0, 3.0]) <= 1.15 * ideal_time([1.0, 3.0]), f"seed {seed}"


def test_shares_stay_where_they_were_found_right():
    shares = run(Balancer(2), [1.0, 3.0], steps=200, noise=0.05)
    assert all(rows in ([95, 33], [96, 32], [97, 31], [98, 30]) for rows in shares[12:])
    assert len({tuple(rows) for rows in shares[30:]}) == 1


def test_a_sudden_change_of_speed_is_followed_within_ten_steps_both_ways():
    def costs(step: int) -> list[float]:
        return [1.0, 3.0, 1.0] if 60 <= step < 120 else [1.0, 1.0, 1.0]

    shares = run(Balancer(3), costs, steps=180, noise=0.05)
    assert shares[60] == [43, 43, 42]
    for step in range(70, 121):
        assert time_of(shares[step], costs(70)) <= 1.1 * ideal_time(costs(70))
    for step in range(130, 181):
        assert time_of(shares[step], costs(130)) <= 1.1 * ideal_time(costs(130))


def test_less_than_the_whole_deviation_is_moved_at_once():
    shares = run(Balancer(2), [1.0, 3.0], steps=3, total=1000)
    assert shares[-1] == [729, 271]  # 3 ** 0.9 to 1, where 3 to 1 would be all


def test_a_move_that_is_too_small_for_a_row_is_made_whole():
    balancer = Balancer(2)
    assert run(balancer, [1.0, 1.7], steps=30, total=4)[-1] == [3, 1]


# --- few rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overhead", [0.0, 5.0])
@pytest.mark.parametrize(("total", "devices"), [(1, 2), (2, 3), (3, 2), (5, 3)])
def test_batches_of_few_rows_do_not_make_equal_devices_unequal(total, devices, overhead):
    balancer = Balancer(devices)
    run(balancer, [1.0] * devices, steps=60, total=total, overhead=overhead, noise=0.1)
    assert balancer.settled == pytest.approx([1 / devices] * devices)


def test_an_empty_batch_and_one_that_was_not_measured_change_nothing():
    balancer = Balancer(2)
    assert balancer.observe([0, 0], [0.0, 0.0]) == (0.5, 0.5)
    for _ in range(9):
        assert balancer.observe([3, 3], [1.0, float("nan")]) == (0.5, 0.5)
        assert balancer.observe([3, 3], [0.0, 0.0]) == (0.5, 0.5)
    assert balancer.trace[-1].seconds_per_row == (None, None)


def test_one_device_has_everything():
    balancer = Balancer(1)
    assert run(balancer, [1.0], steps=30, total=7)[-1] == [7]
    assert balancer.trace[-1].reason == "one device alone"


def test_a_device_without_rows_is_tried_again_and_gets_them_back_when_it_is_fast():
    def costs(step: int) -> list[float]:
        return [1.0, 500.0] if step < 40 else [1.0, 1.0]

    balancer = Balancer(2)
    shares = run(balancer, costs, steps=100, total=16, noise=0.05)
    of_second = [rows[1] for rows in shares]
    assert of_second[3] == 0
    assert of_second[3:40].count(1) == 3, "three steps measure it"
    assert shares[-1] == [8, 8]


def test_a_slow_device_is_tried_again_ever_more_rarely():
    balancer = Balancer(2)
    shares = run(balancer, [1.0, 500.0], steps=1000, total=16)
    begins = [step for step in range(4, 1001) if shares[step][1] > 0 and shares[step - 1][1] == 0]
    waits = [later - earlier for earlier, later in itertools.pairwise(begins)]
    assert begins[0] < 25
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(waits))
    assert balancer.settled[1] < 1 / 100, "what it settled on does not hold the row of a trial"


def test_a_device_that_no_batch_reaches_is_tried_in_the_place_of_another():
    shares = run(Balancer(3), [1.0, 1.0, 1.0], steps=40, total=2)
    assert [1, 1, 0] in shares
    assert any(rows[2] == 1 for rows in shares)


def test_nothing_is_tried_where_it_could_be_compared_with_nothing():
    assert run(Balancer(2), [1.0, 1.0], steps=60, total=1) == [[1, 0]] * 61


# --- the record -----------------------------------------------------------------------------------


def test_every_step_leaves_a_decision():
    balancer = Balancer(2)
    shares = run(balancer, [1.0, 3.0], steps=4, total=100)
    assert [decision.step for decision in balancer.trace] == [1, 2, 3, 4]
    first, _, third, fourth = balancer.trace
    assert first == Decision(
        step=1,
        seconds_per_row=(1.0, 3.0),
        proposed=(0.5, 0.5),
        chosen=(0.5, 0.5),
        reason="measures for 3 steps first",
    )
    assert third.proposed == pytest.approx([0.75, 0.25])
    assert third.chosen == pytest.approx([0.7288, 0.2712], abs=1e-4)
    assert third.reason == "moves: 46% of the step to gain, by the last 3 steps"
    assert workload_sizes(100, third.chosen) == shares[3]
    assert sum(fourth.chosen) == pytest.approx(1.0)
    with pytest.raises(FrozenInstanceError):
        first.step = 2  # type: ignore[misc]


def test_reasons_to_stay_are_told_apart():
    noisy, slight = Balancer(2), Balancer(2)
    run(noisy, [1.0, 1.0], steps=30, noise=0.1)
    run(slight, [1.0, 1.05], steps=60)
    assert noisy.trace[-1].reason.startswith("stays: within the noise of")
    assert slight.trace[-1].reason == "stays: less than 3% of the step to gain"


def test_a_trial_is_told():
    balancer = Balancer(2)
    run(balancer, [1.0, 500.0], steps=25, total=16)
    assert any(each.reason.startswith("tries device 1 again; ") for each in balancer.trace)


def test_the_same_measurements_give_the_same_decisions():
    one, other = Balancer(3), Balancer(3)
    run(one, [1.0, 2.0, 3.0], steps=50, noise=0.2, seed=5)
    run(other, [1.0, 2.0, 3.0], steps=50, noise=0.2, seed=5)
    assert one.trace == other.trace


def test_it_begins_with_the_workloads_given():
    balancer = Balancer(2, workloads=[6, 2])
    assert balancer.workloads == pytest.approx((0.75, 0.25))
    assert run(balancer, [1.0, 3.0], steps=20) == [[96, 32]] * 21
    assert repr(balancer) == "Balancer(0.750, 0.250 after 20 steps)"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "seconds", "name"), [([1], [1.0, 1.0], "rows"), ([1, 1], [1.0], "seconds")]
)
def test_measurements_of_other_devices_are_refused_and_change_nothing(rows, seconds, name):
    balancer = Balancer(2)
    with pytest.raises(ConfigError, match=rf"`{name}` must hold one number per device \(2\)"):
        balancer.observe(rows, seconds)
    assert balancer.trace == ()


@pytest.mark.parametrize(
    "given", [np.array([2.0, 1.0]), torch.tensor([2.0, 1.0]), (share for share in (2, 1))]
)
def test_workloads_may_be_an_array_a_tensor_or_drawn(given):
    assert fixed_workloads(given) == [2, 1]


def test_the_trace_keeps_the_last_decisions_only(monkeypatch):
    """A run of weeks makes as many decisions as batches; each is a few hundred bytes."""
    monkeypatch.setattr("phalanx.plan.balance._TRACE_LENGTH", 5)
    balancer = Balancer(2)
    run(balancer, [1.0, 1.0], steps=12)
    assert [decision.step for decision in balancer.trace] == [8, 9, 10, 11, 12]


def test_as_many_decisions_are_kept_as_the_documents_say():
    assert f"last {balance._TRACE_LENGTH:,} are kept" in (Balancer.trace.__doc__ or "")
    assert f"last {balance._TRACE_LENGTH:,} are kept" in (Balancing.decisions.__doc__ or "")
