"""Workers that die: at every point, in every way, alone and together. The bits stay the same."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.chaos.course import DEADLINE_S, Course, batches
from tests.chaos.saboteur import MODULE_POINTS, POINTS, Order

pytestmark = pytest.mark.promise("killed-workers-cost-no-bit")

ON_THE_WAY = [point for point in (*POINTS, *MODULE_POINTS) if point != "born"]
WITH_A_MICROBATCH = {*POINTS[1:7], *MODULE_POINTS}
MOST_STEPS = 1000
KINDS = ["kill", "segfault", "exit", "terminate", "memory and die"]


def deaths() -> list[object]:
    """Every point with ``kill -9``, the workers by turns; at night every kind for all."""
    gate = [(point, index % 3, "kill") for index, point in enumerate(ON_THE_WAY)]
    every = itertools.product(ON_THE_WAY, (0, 1, 2), KINDS)
    rest = [pytest.param(*each, marks=pytest.mark.night) for each in every if each not in gate]
    return [*gate, *rest]


@pytest.mark.parametrize(("point", "worker", "deed"), deaths())
def test_a_death_changes_nothing(course: Course, point: str, worker: int, deed: str) -> None:
    (lost,) = course.suffer({worker: Order(point, deed)})
    assert (lost.microbatch is not None) == (point in WITH_A_MICROBATCH)
    assert lost.step == course.disturbed.trainer.steps


@pytest.mark.parametrize(
    "orders",
    [
        {
            1: Order("gradients half written", passing=2),
            2: Order("inside backward", "exit", passing=2),
        },
        pytest.param(
            {worker: Order("before reply", "segfault", passing=worker + 1) for worker in range(3)},
            marks=pytest.mark.night,
        ),
    ],
    ids=["two", "all"],
)
def test_several_workers_die_at_once(course: Course, orders: dict[int, Order]) -> None:
    course.suffer(orders)


def test_a_death_in_an_evaluation_is_told_at_its_end(course: Course) -> None:
    course.disturbed.lost.clear()
    expected = course.undisturbed.trainer.evaluate(batches())
    course.orders.give(1, Order("inside forward"))
    deadline_s = time.monotonic() + DEADLINE_S
    while course.orders.fired_s(1) is None:
        assert time.monotonic() < deadline_s
        assert course.disturbed.trainer.evaluate(batches()) == expected
    (lost,) = course.disturbed.lost
    assert (lost.worker, lost.step) == (1, course.disturbed.trainer.steps)
    course.disturbed.lost.clear()


@pytest.mark.parametrize("deed", ["kill", pytest.param("exit", marks=pytest.mark.night)])
def test_a_replacement_that_dies_while_it_starts_is_replaced(course: Course, deed: str) -> None:
    course.disturbed.lost.clear()
    course.kill(0)  # between two updates
    course.orders.give(0, Order("born", deed))
    course.step()
    assert course.orders.fired_s(0) is not None
    course.step()
    course.compare()
    first, second = course.disturbed.lost
    assert (first.worker, first.microbatch, second.worker) == (0, None, 0)


def test_the_only_worker_may_die(tmp_path: Path) -> None:
    """When it starts for the first time, and with a microbatch."""
    with Course(tmp_path / "orders", replicas=1) as course:
        course.orders.give(0, Order("born"))
        course.warm_up()
        assert course.orders.fired_s(0) is not None
        assert [lost.step for lost in course.disturbed.lost] == [1]
        course.suffer({0: Order("inside forward", "terminate", passing=4)})
        course.suffer({0: Order("before reply", "memory and die", passing=3)})


def steps_until_it_raises(course: Course) -> None:
    for _ in range(MOST_STEPS):
        course.step()
        course.compare()


@pytest.mark.parametrize("deed", ["memory", "leave"])
def test_what_a_worker_raises_in_a_microbatch_refuses_the_step_and_changes_nothing(
    course: Course, deed: str
) -> None:
    """A worker that may have no more memory, or calls `sys.exit`, lives on: it is the caller's."""
    course.orders.give(1, Order("inside backward", deed))
    with pytest.raises((MemoryError, SystemExit)) as raised:
        steps_until_it_raises(course)
    assert any("Raised by replica 1" in note for note in raised.value.__notes__)
    assert course.orders.fired_s(1) is not None
    course.compare()
    course.step()
    course.compare()
