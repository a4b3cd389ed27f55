"""Planted bugs: what happens after a death is done wrong on purpose, and the comparison says so."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import Tensor

from phalanx.execution import processes
from phalanx.execution.run import RunState, TreeSums
from phalanx.plan import Node
from phalanx.replicas.buffers import _Buffer
from phalanx.train.dispatcher import EventDispatcher
from phalanx.train.position import BatchLoss
from tests.chaos.course import Course
from tests.chaos.saboteur import Order


def assert_caught(course: Course, name: str) -> None:
    """Fail unless the comparison fails, and names ``name``."""
    with pytest.raises(AssertionError, match=rf"differ after step.*\b{name}\b"):
        course.compare()


def is_of_worker(value: Any) -> bool:
    """Tell whether a partial sum lies in shared memory, as those of undisturbed threads do not."""
    return value is not None and bool(value.kept_alive)


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return a set that gets every microbatch that a worker has died with."""
    microbatches: set[int] = set()
    real = RunState.give_back

    def give_back(state: Any, microbatch: int, replica: int) -> None:
        microbatches.add(microbatch)
        real(state, microbatch, replica)

    monkeypatch.setattr(RunState, "give_back", give_back)
    return microbatches


def test_a_lost_microbatch_is_caught(
    course: Course, monkeypatch: pytest.MonkeyPatch, returned: set[int]
) -> None:
    """A worker died with it, and nobody's gradients are added in their place."""
    real = TreeSums.put

    def put(sums: Any, node: Node, value: Any) -> None:
        is_lost = is_of_worker(value) and node.index in returned
        real(sums, node, None if is_lost else value)

    monkeypatch.setattr(TreeSums, "put", put)
    course.suffer({1: Order("gradients written")}, compared=False)
    assert returned
    assert_caught(course, "model.first.weight")


@pytest.mark.night
def test_a_doubled_microbatch_is_caught(
    course: Course, monkeypatch: pytest.MonkeyPatch, returned: set[int]
) -> None:
    """The dead worker's gradients are added, and those of whoever repeats its work."""
    real = TreeSums.put

    def put(sums: Any, node: Node, value: Any) -> None:
        if is_of_worker(value) and node.index in returned:
            for gradient in value.gradients:
                gradient.mul_(2)
        real(sums, node, value)

    monkeypatch.setattr(TreeSums, "put", put)
    course.suffer({0: Order("gradients written")}, compared=False)
    assert returned
    assert_caught(course, "model.first.weight")


def test_a_wrong_seed_on_retry_is_caught(
    course: Course, monkeypatch: pytest.MonkeyPatch, returned: set[int]
) -> None:
    real = processes.MicrobatchMessage

    def make(*, index: int, seed: tuple[int, ...], **parts: Any) -> Any:
        wrong = (*seed[:-1], seed[-1] + 1000) if index in returned else seed
        return real(index=index, seed=wrong, **parts)

    monkeypatch.setattr(processes, "MicrobatchMessage", make)
    course.suffer({1: Order("before forward")}, compared=False)
    assert returned
    assert_caught(course, "losses")


def test_a_position_that_is_advanced_twice_is_caught(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EventDispatcher.dispatch_failures

    def tell(dispatcher: Any, step: int) -> None:
        before = len(course.disturbed.lost)
        real(dispatcher, step)
        if len(course.disturbed.lost) > before:
            trainer = course.disturbed.trainer
            trainer._run_position.position = trainer._position.next_batch(BatchLoss(0.0, 0.0, 0))

    monkeypatch.setattr(EventDispatcher, "dispatch_failures", tell)
    course.suffer({0: Order("inside backward")}, compared=False)
    assert_caught(course, "position")


@pytest.mark.night
def test_stale_statistics_are_caught(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker starts each step from the buffers of its first one."""
    program, set_copy, firsts = os.getpid(), _Buffer.set_copy, {}

    def start_from_the_first(buffer: _Buffer, own: Tensor) -> None:
        if os.getpid() != program:
            own.copy_(firsts.setdefault(buffer.name, own.clone()))
        set_copy(buffer, own)

    with monkeypatch.context() as patch:
        patch.setattr(_Buffer, "set_copy", start_from_the_first)
        course.disturbed.trainer.refresh()
        for _ in range(3):
            course.step()
    assert_caught(course, "model.norm.running_mean")
    course.disturbed.trainer.refresh()
