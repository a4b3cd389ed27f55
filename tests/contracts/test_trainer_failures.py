"""An exception inside a replica arrives as it was raised, and leaves everything usable.

Its own type and data, its own traceback down to the line that raised, a note that names replica and
microbatch; weights, statistics and optimizer as before; no thread left.

A failing step is tried in `test_executors`, and what the other ranks of a failing one are told, in
`test_rank_executor`. A step within a step needs a trainer, which a worker process has not.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.callbacks import StepDone
from tests.products import some_by_day
from tests.worlds import EXECUTORS, World, in_every_executor, in_executor_worlds
from tests.zoo import (
    MLP,
    Loader,
    adamw,
    assert_same_bits,
    batches_of,
    mlp,
    sgd,
    state_of,
    vector_batch,
)

pytestmark = pytest.mark.promise("errors-arrive-as-raised")

MARKER = 1e6  # a row that holds this makes the code under test raise
MICROBATCHES = 8
Executor = tuple[str, int]
ROWS = 16  # two rows in each microbatch


class Boom(Exception):
    """An exception that cannot be made again from its message alone."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"boom {code} in {where}")
        self.code = code
        self.where = where


def explode(where: str) -> None:
    raise Boom(7, where=where)


class Fused(nn.Module):
    """Raises at the marker, behind a batch norm whose statistics are written by then."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where = where
        self.norm = nn.BatchNorm1d(7)
        self.net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        marked = bool((x == MARKER).any())
        x = self.norm(x.clamp(max=3.0))
        if self.where == "forward" and marked:
            explode("forward")
        return self.net(x)


def loss_for(where: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if where == "loss" and bool((targets < 0).any()):
            explode("loss")
        return MLP.loss(outputs, targets.clamp(min=0))

    return loss


def marked_batch(row: int) -> tuple[Tensor, Tensor]:
    x, targets = vector_batch(ROWS)
    x, targets = x.clone(), targets.clone()
    x[row] = MARKER
    targets[row] = -1
    return x, targets


def whole_state(trainer: phalanx.Trainer) -> list[Any]:
    return [
        state_of(trainer.module),
        copy.deepcopy(trainer.optimizer.state_dict()),
        trainer.steps,
        trainer.epochs,
        [each.training for each in trainer.module.modules()],
    ]


def traceback_of(error: BaseException) -> str:
    """Return it as it is printed; of a worker process it comes as text."""
    return "".join(traceback.format_exception(error))


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def trainer_of(executor: Executor, net: nn.Module, loss: Any, **options: Any) -> phalanx.Trainer:
    name, replicas = executor
    options = {"microbatches": MICROBATCHES, **options}
    return phalanx.Trainer(net, loss, sgd, executor=name, replicas=replicas, **options)


@some_by_day("executor, where", EXECUTORS, ["forward", "loss"])
def test_a_failure_in_evaluation_arrives_too_and_training_mode_comes_back(
    executor: Executor, where: str
) -> None:
    with trainer_of(executor, Fused(where), loss_for(where)) as trainer:
        trainer.step(vector_batch(ROWS))
        before = whole_state(trainer)
        with pytest.raises(Boom) as caught:
            trainer.evaluate(Loader([vector_batch(ROWS), marked_batch(9)]))
        assert (caught.value.code, caught.value.where) == (7, where)
        assert "in explode" in traceback_of(caught.value)
        assert "replica" in notes_of(caught.value)
        assert "In batch 2 of the evaluation." in notes_of(caught.value)
        assert_same_bits(whole_state(trainer), before)
        assert torch.isfinite(torch.tensor(trainer.evaluate(Loader([vector_batch(ROWS)]))["loss"]))


@some_by_day("executor, where", EXECUTORS, ["weight", "callback", "loader"])
def test_an_exception_of_the_users_functions_arrives_and_whole_steps_count(
    executor: Executor, where: str
) -> None:
    good, armed = vector_batch(ROWS), [where]

    def fail_in(place: str) -> None:
        if place in armed and trainer.steps == 1:
            armed.clear()
            explode(place)

    def weight(part: Any) -> float:
        fail_in("weight")
        return 1.0

    def callback(event: object) -> None:
        if isinstance(event, StepDone):
            fail_in("callback")

    def loader() -> Iterator[Any]:
        yield good
        fail_in("loader")
        yield good

    with trainer_of(executor, mlp(), MLP.loss, weight=weight, callbacks=[callback]) as trainer:
        with pytest.raises(Boom):
            trainer.fit(loader())
        assert trainer.steps == 1
        assert trainer.step(good).step == 2


def predicted(executor: str, replicas: int) -> Tensor:
    def forward(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        scores = net(batch["x"])
        return (MLP.loss(scores, batch["labels"]) if "labels" in batch else None), scores

    batch, weight = {"x": vector_batch(8)[0]}, lambda batch: len(batch["labels"])
    options = {"forward": forward, "weight": weight}
    with trainer_of((executor, replicas), mlp(), None, **options) as trainer:
        with pytest.raises(KeyError, match="labels"):
            trainer.evaluate([batch])
        return trainer.predict([batch])


@in_executor_worlds
def test_batches_without_labels_are_predicted_and_not_evaluated(world: World, n: int) -> None:
    for scores in world.run(predicted, n):
        assert torch.allclose(scores, mlp().eval()(vector_batch(8)[0]))


# --- stopping -------------------------------------------------------------------------------------


def house_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("phalanx"))


def children() -> set[str]:
    """Return the ids of the processes that this one has started and not waited for."""
    found = Path("/proc/self/task").glob("*/children")
    return {pid for each in found for pid in each.read_text().split()}


@pytest.fixture
def threads_before() -> list[str]:
    return house_threads()


@some_by_day("executor, failing", EXECUTORS, [False, True])
def test_no_thread_and_no_process_is_left_after_close(
    executor: Executor, failing: bool, threads_before: list[str]
) -> None:
    processes_before = children()
    trainer = trainer_of(executor, Fused("forward"), loss_for(""))
    if failing:
        with pytest.raises(Boom):
            trainer.step(marked_batch(4))
    trainer.step(vector_batch(ROWS))
    if executor[0] == "threads":
        assert set(house_threads()) >= {f"phalanx-replica-{index}" for index in range(3)}
    if executor[0] == "processes":
        assert len(children() - processes_before) >= 2
    trainer.close()
    assert house_threads() == threads_before
    assert children() <= processes_before
    trainer.close()


@in_every_executor
def test_stop_may_be_called_from_another_thread(executor: str, replicas: int) -> None:
    """As a signal handler or a notebook's button does."""
    begun = threading.Event()

    def watch(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            begun.set()
            stopper.join()

    def stop() -> None:
        begun.wait(30)
        trainer.stop()

    stopper = threading.Thread(target=stop)
    batches = batches_of(MLP, ROWS, torch.float32, 5)
    with trainer_of((executor, replicas), mlp(), MLP.loss, callbacks=[watch]) as trainer:
        stopper.start()
        trainer.fit(Loader(batches), epochs=100)
        assert trainer.steps == 2


@pytest.mark.parametrize("executor", ["inline", "threads"])
def test_a_step_of_another_thread_within_a_step_is_refused(executor: str) -> None:
    refused: list[BaseException] = []

    def step_too() -> None:
        with pytest.raises(phalanx.StateError, match="between two steps") as caught:
            trainer.step(vector_batch(ROWS))
        refused.append(caught.value)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if within.is_set():
            within.clear()
            other = threading.Thread(target=step_too)
            other.start()
            other.join(60)
        return MLP.loss(outputs, targets)

    within, replicas = threading.Event(), 1 if executor == "inline" else 2
    with phalanx.Trainer(
        mlp(), loss, adamw, microbatches=None, replicas=replicas, executor=executor
    ) as trainer:
        trainer.step(vector_batch(ROWS))
        within.set()
        assert trainer.step(vector_batch(ROWS)).step == trainer.steps == 2
    assert len(refused) == 1


@pytest.mark.parametrize("executor", ["inline", "threads", "processes", "DataParallel"])
def test_a_piece_of_one_row_in_batch_norm_says_so_and_the_ways_out(executor: str) -> None:
    net, (x, targets) = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)), vector_batch(5)
    raised = pytest.raises(ValueError, match="more than 1 value per channel")
    if executor == "DataParallel":
        with phalanx.DataParallel(net, devices=3) as model, raised as caught:
            model(x)
    else:
        options = {"executor": executor, "replicas": 1, "microbatches": 3}
        with phalanx.Trainer(net, MLP.loss, sgd, **options) as trainer, raised as caught:
            trainer.step((x, targets))
    notes = " ".join(caught.value.__notes__)
    assert "This piece of the batch has 1 row" in notes
    assert "fewer pieces (`microbatches`, `replicas`)" in notes
    assert "`drop_last=True`" in notes
