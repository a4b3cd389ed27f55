"""Executor groups whose workers die: in forward, in backward and between. The bits stay the same.

Two groups do the same passes, one on worker processes that suffer faults, one on threads that do
not; everything is compared after each step.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import PeerLost, StateError
from phalanx.execution import ProcessExecutor
from phalanx.execution.work_queue import WorkQueue
from phalanx.executor_group import DataParallelExecutorGroup
from phalanx.ipc import fail_points
from tests.chaos.course import DEADLINE_S, differing
from tests.chaos.saboteur import REASONS, Order, Orders, Saboteur
from tests.conformance.containers import draw
from tests.conformance.zoo import CLASSES, RULES, Zoo

pytestmark = pytest.mark.filterwarnings("ignore:`replicas` should be at most")

SHAPE = (11, 2, 4, 3)
IN_FORWARD = [
    ("inside forward", 1),
    ("before reply", 1),
    ("microbatch taken", 1),
    ("before forward", 1),
]
IN_BACKWARD = [
    ("inside backward", 1),
    ("gradients half written", 1),
    ("microbatch taken", 2),
    ("after backward", 2),
    ("gradients written", 1),
    ("before reply", 2),
]
IN_THE_GATE = {"inside forward", "inside backward", "gradients half written"}


class Watched:
    """A group, its module and what it has told."""

    def __init__(self, executor: str) -> None:
        self.net = Zoo(dropout=0.3)
        self.lost: list[phalanx.WorkerLost] = []
        self.group = DataParallelExecutorGroup(
            self.net,
            3,
            data=[("data", SHAPE)],
            workloads=[1, 5, 3],
            inputs_need_grad=True,
            buffers=RULES,
            executor=phalanx.Processes(
                timeout_s=DEADLINE_S, max_failures=None, on_failure=self.lost.append
            )
            if executor == "processes"
            else executor,
        )
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.found: dict[str, object] = {}

    def step(self, number: int, between: Callable[[], object] = lambda: None) -> None:
        """Go forward and back, and train; random numbers start from the step's own."""
        torch.manual_seed(number)
        self.group.forward(draw(*SHAPE, seed=number, dtype=torch.float32))
        (output,) = self.group.outputs()
        between()
        self.group.backward([draw(SHAPE[0], CLASSES, seed=number, dtype=torch.float32)])
        (input_grad,) = self.group.input_grads()
        self.found = {"output": output, "input gradient": input_grad, "drawn": torch.rand(())}
        self.found |= {f"{name} gradient": p.grad for name, p in self.net.named_parameters()}
        self.group.update(self._optimizer)
        self.found |= dict(self.net.state_dict())


class Pair:
    """The two groups; use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.orders = Orders(folder)
        self.disturbed, self.undisturbed = Watched("processes"), Watched("threads")
        self.steps = 0

    def __enter__(self) -> Pair:
        self._planted_before = fail_points.injected()  # a course may be running around this one
        fail_points.inject(Saboteur(str(self.orders.folder)))
        self.step()
        self.compare()
        return self

    def __exit__(self, *exc: object) -> None:
        fail_points.inject(self._planted_before)
        self.disturbed.group.close()
        self.undisturbed.group.close()

    @property
    def executor(self) -> ProcessExecutor:
        executor = self.disturbed.group._model._running.executor
        assert isinstance(executor, ProcessExecutor)
        return executor

    def step(self, between: Callable[[], object] = lambda: None) -> None:
        self.steps += 1
        self.disturbed.step(self.steps, between)
        self.undisturbed.step(self.steps)

    def compare(self) -> None:
        names = differing(self.disturbed.found, self.undisturbed.found)
        assert not names, f"differ after step {self.steps}: {', '.join(names)}"

    def start_over(self) -> None:
        """Give the disturbed one the other's state, after something went wrong."""
        self.orders.withdraw()
        self.disturbed.net.load_state_dict(self.undisturbed.net.state_dict())
        self.disturbed.lost.clear()

    def await_worker(self, index: int) -> None:
        assert self.executor._workers[index].poll_ready(DEADLINE_S)

    def suffer(self, index: int, order: Order) -> phalanx.WorkerLost:
        """Do a step in which a worker carries out an order; return its loss."""
        # While others are being replaced, a worker may have two parts of one pass in hands.
        for each in range(3) if order.passing > 1 else [index]:
            self.await_worker(each)
        self.orders.give(index, order)
        self.step()
        assert self.orders.fired_s(index) is not None
        return self.told_of(index, REASONS[order.deed])

    def suffer_between(self, index: int) -> phalanx.WorkerLost:
        """Do a step in which a worker is killed between forward and backward; return its loss."""
        self.await_worker(index)
        self.step(between=lambda: self.kill(index))
        return self.told_of(index, "SIGKILL")

    def told_of(self, index: int, reason: str) -> phalanx.WorkerLost:
        (lost,) = self.disturbed.lost
        self.disturbed.lost.clear()
        assert (lost.worker, lost.step) == (index, self.steps)
        assert reason in lost.reason
        return lost

    def kill(self, index: int) -> None:
        worker = self.executor._workers[index]
        os.kill(worker.pid, signal.SIGKILL)
        assert wait([worker._process.sentinel], DEADLINE_S)


@pytest.fixture(scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("orders")) as running:
        yield running


@pytest.fixture
def pair(_running: Pair) -> Iterator[Pair]:
    yield _running
    _running.start_over()


def deaths() -> list[object]:
    """Return all points, the workers by turns; at night those that resemble another."""
    cases = [(*each, index % 3) for index, each in enumerate([*IN_FORWARD, *IN_BACKWARD])]
    seen: set[str] = set()
    marked: list[object] = []
    for case in cases:
        in_gate = case[0] in IN_THE_GATE and case[0] not in seen
        seen.add(case[0])
        marked.append(case if in_gate else pytest.param(*case, marks=pytest.mark.night))
    return marked


@pytest.mark.parametrize(("point", "passing", "worker"), deaths())
def test_a_death_in_a_pass_changes_nothing(
    pair: Pair, point: str, passing: int, worker: int
) -> None:
    lost = pair.suffer(worker, Order(point, passing=passing))
    pair.compare()
    assert lost.microbatch is not None


def test_a_death_between_the_passes_changes_nothing(pair: Pair) -> None:
    lost = pair.suffer_between(1)
    pair.compare()
    assert lost.microbatch is None  # it is missed before it is given one


@pytest.mark.night
def test_all_workers_may_die_between_the_passes(pair: Pair) -> None:
    for index in range(3):
        pair.await_worker(index)
    pair.step(between=lambda: [pair.kill(index) for index in range(3)])
    pair.compare()
    assert sorted(lost.worker for lost in pair.disturbed.lost) == [0, 1, 2]


def test_a_worker_that_stops_in_backward_is_dumped_and_replaced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.await_worker(2)
    monkeypatch.setattr(pair.executor, "_timeout_s", 4.0)
    pair.orders.give(2, Order("inside backward", "hang"))
    pair.step()
    pair.compare()
    told = [lost for lost in pair.disturbed.lost if lost.worker == 2]
    assert "gave no answer" in told[0].reason
    assert "in backward" in told[0].dump


def test_a_pass_that_cannot_be_repeated_is_refused_and_the_next_one_is_right(pair: Pair) -> None:
    """A failed forward pass has given the workers the buffers of today."""

    def fail_and_kill() -> None:
        pair.disturbed.net.fails = "forward"
        with pytest.raises(ArithmeticError):
            pair.disturbed.group.forward(torch.ones(SHAPE))
        pair.disturbed.net.fails = ""
        pair.kill(0)

    pair.await_worker(0)
    with pytest.raises(StateError, match="another forward pass was begun since"):
        pair.step(between=fail_and_kill)
    pair.undisturbed.step(pair.steps)
    pair.start_over()
    pair.step()
    pair.compare()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, data: Tensor) -> Tensor:
        scores: Tensor = self.fc(data)
        return scores


def test_one_loss_too_many_is_an_error_and_the_group_goes_on(tmp_path: Path) -> None:
    lost: list[phalanx.WorkerLost] = []
    net = Small()
    with DataParallelExecutorGroup(
        net,
        1,
        data=[("data", (5, 3))],
        executor=phalanx.Processes(max_failures=0, on_failure=lost.append, memory_dir=tmp_path),
    ) as group:
        group.forward(torch.ones(5, 3))
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        os.kill(group.worker_pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"At most 0 workers .* while it held microbatch 0"):
            group.backward([torch.ones(5, 2)])
        assert net.fc.bias.grad is None
        assert lost == []
        group.forward(torch.ones(5, 3))
        group.backward([torch.ones(5, 2)])
        assert net.fc.bias.grad.tolist() == [5, 5]
        assert [each.worker for each in lost] == [0]


# --- planted bugs ---------------------------------------------------------------------------------


def assert_caught(pair: Pair, name: str) -> None:
    """Fail unless the comparison fails, and names ``name``."""
    with pytest.raises(AssertionError, match=rf"differ after step.*\b{name}\b"):
        pair.compare()


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return a set that gets every microbatch that a worker has died with."""
    microbatches: set[int] = set()
    real = WorkQueue.give_back

    def give_back(queue: Any, microbatch: int) -> None:
        microbatches.add(microbatch)
        real(queue, microbatch)

    monkeypatch.setattr(WorkQueue, "give_back", give_back)
    return microbatches


def test_a_wrong_seed_in_a_repeated_forward_pass_is_caught(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, returned: set[int]
) -> None:
    real = ProcessExecutor._prepare

    def prepare(executor: Any, index: int, microbatch: int, run: Any) -> Any:
        if microbatch in returned:
            state = copy.copy(run.state)
            state.seed = (*state.seed, 1)
            run = dataclasses.replace(run, state=state)
        return real(executor, index, microbatch, run)

    monkeypatch.setattr(ProcessExecutor, "_prepare", prepare)
    pair.suffer(1, Order("inside forward"))
    assert_caught(pair, "output")


def test_the_buffers_of_today_in_a_repeated_forward_pass_are_caught(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def today(executor: Any, job: Any) -> Any:
        job.as_of = None
        return real(executor, job)

    real = ProcessExecutor._version_for
    monkeypatch.setattr(ProcessExecutor, "_version_for", today)
    pair.suffer_between(0)
    assert_caught(pair, "first.weight gradient")


def test_the_gradients_of_a_dead_worker_are_caught(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, returned: set[int]
) -> None:
    real = ProcessExecutor._count

    def count(executor: Any, index: int, message: Any, done: Any, run: Any) -> None:
        if message.microbatch in returned:
            for gradient in message.gradient_buffer.gradients:
                gradient.mul_(2)
        real(executor, index, message, done, run)

    monkeypatch.setattr(ProcessExecutor, "_count", count)
    pair.suffer(2, Order("gradients half written"))
    assert_caught(pair, "first.weight gradient")
