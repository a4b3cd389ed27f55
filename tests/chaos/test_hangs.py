"""Workers that live and do not answer: they are dumped, killed and replaced; the bits stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.chaos.course import Course
from tests.chaos.saboteur import Order

pytestmark = pytest.mark.promise("killed-workers-cost-no-bit")

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    with Course(tmp_path_factory.mktemp("orders"), 2, timeout_s=TIMEOUT_S) as running:
        running.warm_up()
        yield running


@pytest.mark.parametrize(
    "orders",
    [
        {0: Order("inside forward", "stop"), 1: Order("gradients written", "hang")},
        pytest.param(
            {0: Order("before reply", "stop"), 1: Order("inside backward", "spin")},
            marks=pytest.mark.night,
        ),
    ],
    ids=["stop and hang", "stop and spin"],
)
def test_a_worker_that_hangs_is_replaced_and_changes_nothing(
    hanging: Course, orders: dict[int, Order]
) -> None:
    for lost in hanging.suffer(orders):
        assert "saboteur.py" in lost.dump, lost


def test_a_replacement_that_hangs_while_it_starts_is_replaced(hanging: Course) -> None:
    hanging.kill(0)
    hanging.orders.give(0, Order("born", "stop"))
    hanging.step()
    hanging.compare()
    hanging.told_of(0, f"gave no answer for {TIMEOUT_S:g} s")


def test_a_worker_that_reads_nothing_of_a_long_message_is_replaced(hanging: Course) -> None:
    module = hanging.disturbed.trainer.module
    module.long = b""  # type: ignore[assignment]
    hanging.step()
    if hanging.disturbed.trainer._position.batch == 0:
        hanging.step()  # else all are forked again
    hanging.disturbed.lost.clear()
    os.kill(hanging.worker(1).pid, signal.SIGSTOP)
    module.long = bytes(1 << 24)  # type: ignore[assignment]
    hanging.step()
    hanging.compare()
    hanging.told_of(1, f"gave no answer for {TIMEOUT_S:g} s")
