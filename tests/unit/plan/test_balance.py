"""Workloads that follow measured speeds, in simulation: the times are drawn here, none is taken."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from phalanx.plan import Balancer, fixed_workloads, workload_sizes

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


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_equal_devices_keep_equal_shares(num_devices, noise):
    for seed in range(8):
        shares = run(Balancer(num_devices), [1.0] * num_devices, steps=150, noise=noise, seed=seed)
        assert shares == [shares[0]] * 151, f"seed {seed}"


def test_noise_moves_little():
    for seed in range(8):
        shares = run(Balancer(2), [1.0, 1.0], steps=150, noise=0.1, seed=seed)
        assert all(abs(rows[0] - 64) <= 10 for rows in shares), f"seed {seed}"


def test_three_late_steps_move_nothing():
    def costs(step: int) -> list[float]:
        return [5.0 if 40 <= step < 43 else 1.0, 1.0]

    assert run(Balancer(2), costs, steps=80, noise=0.02) == [[64, 64]] * 81


def test_what_slows_all_devices_at_once_moves_nothing():
    shares = run(Balancer(2), lambda step: [1.0 + step % 7] * 2, steps=60, noise=0.02)
    assert shares == [[64, 64]] * 61


def test_a_difference_that_is_not_worth_moving_rows_for_moves_none():
    assert run(Balancer(2), [1.0, 1.04], steps=100) == [[64, 64]] * 101


# --- unequal devices ------------------------------------------------------------------------------

UNEQUAL = [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0, 3.0), (2.0, 3.0, 1.0), (1.0, 10.0)]


@pytest.mark.parametrize("costs", UNEQUAL)
@pytest.mark.parametrize("overhead", [0.0, 0.25, 0.5])
def test_a_slow_device_comes_within_a_tenth_of_the_ideal(costs, overhead):
    """The overhead of a step is given in terms of a device's time for an even share."""
    extra = overhead * TOTAL / len(costs)
    for seed in range(10):
        shares = run(Balancer(len(costs)), costs, steps=28, overhead=extra, noise=0.02, seed=seed)
        limit = 1.1 * ideal_time(costs, overhead=extra)
        assert time_of(shares[-1], costs, extra) <= limit, f"seed {seed}: {shares}"


def test_a_sudden_change_of_speed_is_followed_both_ways():
    def costs(step: int) -> list[float]:
        return [1.0, 3.0, 1.0] if 60 <= step < 120 else [1.0, 1.0, 1.0]

    shares = run(Balancer(3), costs, steps=180, noise=0.02)
    assert shares[60] == [43, 43, 42]
    for step in (*range(80, 121), *range(140, 181)):
        at = costs(step - 1)
        assert time_of(shares[step], at) <= 1.1 * ideal_time(at)


# --- few rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overhead", [0.0, 5.0])
@pytest.mark.parametrize(("total", "devices"), [(1, 2), (2, 3), (3, 2), (5, 3)])
def test_batches_of_few_rows_do_not_make_equal_devices_unequal(total, devices, overhead):
    shares = run(Balancer(devices), [1.0] * devices, steps=60, total=total, overhead=overhead)
    assert shares == [shares[0]] * 61


def test_an_empty_batch_and_one_that_was_not_measured_change_nothing():
    balancer = Balancer(2)
    assert balancer.observe([0, 0], [0.0, 0.0]) == (0.5, 0.5)
    for _ in range(9):
        assert balancer.observe([3, 3], [1.0, float("nan")]) == (0.5, 0.5)
        assert balancer.observe([3, 3], [0.0, 0.0]) == (0.5, 0.5)


def test_one_device_has_everything():
    assert run(Balancer(1), [1.0], steps=30, total=7)[-1] == [7]


def test_a_slow_device_keeps_a_row_and_gets_more_when_it_is_fast():
    def costs(step: int) -> list[float]:
        return [1.0, 500.0] if step < 40 else [1.0, 1.0]

    shares = run(Balancer(2), costs, steps=100, total=16, noise=0.02)
    assert shares[40] == [15, 1]
    assert abs(shares[-1][0] - 8) <= 1


def test_it_begins_with_the_workloads_given():
    balancer = Balancer(2, workloads=[6, 2])
    assert balancer.workloads == pytest.approx((0.75, 0.25))
    assert run(balancer, [1.0, 3.0], steps=20) == [[96, 32]] * 21
    assert repr(balancer) == "Balancer(0.750, 0.250)"


@pytest.mark.parametrize(
    "given", [np.array([2.0, 1.0]), torch.tensor([2.0, 1.0]), (share for share in (2, 1))]
)
def test_workloads_may_be_an_array_a_tensor_or_drawn(given):
    assert fixed_workloads(given) == [2, 1]
