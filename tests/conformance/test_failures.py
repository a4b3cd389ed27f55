"""An exception inside a replica arrives as it was raised, and leaves everything usable.

Its own type and data, its own traceback down to the line that raised, a note that names replica and
microbatch; weights, statistics and optimizer as before; no thread left.
"""

from __future__ import annotations

import copy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.callbacks import StepDone
from phalanx.execution import Shards
from tests.multiprocess.children import Children, Parent
from tests.zoo import (
    MLP,
    Loader,
    adamw,
    assert_same_bits,
    batches_of,
    gradients_of,
    mlp,
    sgd,
    state_of,
    vector_batch,
)

pytestmark = pytest.mark.promise("errors-arrive-as-raised")

INTERRUPTS = 100
MARKER = 1e6  # a row that holds this makes the code under test raise
MICROBATCHES = 8
ROWS = 16  # two rows in each microbatch


class Boom(Exception):
    """An exception that cannot be made again from its message alone."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"boom {code} in {where}")
        self.code = code
        self.where = where


def explode(where: str) -> None:
    raise Boom(7, where=where)


class ExplodesGoingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if bool((x == MARKER).any()):
            explode("backward")
        return gradient


class Fuse(nn.Module):
    """Hands its input on; at the marker it raises, in forward or in backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward" and bool((x == MARKER).any()):
            explode("forward")
        if self.where == "backward":
            x = ExplodesGoingBack.apply(x)
        return x.clamp(max=3.0)


class Fused(nn.Module):
    """Batch norm in front, so that statistics are written before anything goes wrong."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.lift = nn.Linear(7, 7)
        self.fuse = Fuse(where)
        self.net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        marked = (x == MARKER).any(1, keepdim=True)
        lifted = torch.where(marked, torch.full_like(x, MARKER), self.lift(x.clamp(max=3.0)))
        return self.norm(self.net(self.fuse(lifted)))


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


def functions_in(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


WHERE = pytest.mark.parametrize("where", ["forward", "backward", "loss"])


@WHERE
def test_the_next_fit_goes_on_behind_the_last_step_that_was_done(where: str) -> None:
    good = [vector_batch(ROWS, seed=seed) for seed in range(3)]
    with phalanx.Trainer(
        Fused(where), loss_for(where), sgd, microbatches=None, replicas=2
    ) as trainer:
        with pytest.raises(Boom):
            trainer.fit(Loader([good[0], marked_batch(3), good[2]]))
        assert (trainer.steps, trainer.epochs) == (1, 0)
        trainer.fit(Loader(good))
        assert (trainer.steps, trainer.epochs) == (3, 1)
        trainer.fit(Loader(good))
        assert (trainer.steps, trainer.epochs) == (6, 2)


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_a_failure_in_evaluation_arrives_too_and_training_mode_comes_back(where: str) -> None:
    with phalanx.Trainer(
        Fused(where), loss_for(where), sgd, microbatches=None, replicas=2
    ) as trainer:
        trainer.step(vector_batch(ROWS))
        before = whole_state(trainer)
        with pytest.raises(Boom) as caught:
            trainer.evaluate(Loader([vector_batch(ROWS), marked_batch(9)]))
        assert "explode" in functions_in(caught.value)
        assert "replica" in notes_of(caught.value)
        assert_same_bits(whole_state(trainer), before)
        assert torch.isfinite(torch.tensor(trainer.evaluate(Loader([vector_batch(ROWS)]))["loss"]))


def test_when_all_replicas_fail_one_exception_arrives() -> None:
    x, targets = vector_batch(ROWS)
    with phalanx.Trainer(
        Fused("forward"), loss_for("forward"), sgd, replicas=3, microbatches=MICROBATCHES
    ) as trainer:
        with pytest.raises(Boom) as caught:
            trainer.step((torch.full_like(x, MARKER), targets))
        assert "microbatch" in notes_of(caught.value)
        trainer.step((x, targets))


def test_an_exception_of_the_weight_function_arrives() -> None:
    def weight(part: Any) -> float:
        explode("weight")
        return 1.0

    with phalanx.Trainer(
        mlp(), MLP.loss, sgd, microbatches=None, replicas=2, weight=weight
    ) as trainer:
        before = whole_state(trainer)
        with pytest.raises(Boom):
            trainer.step(vector_batch(ROWS))
        assert_same_bits(whole_state(trainer), before)


def test_an_exception_of_a_callback_arrives_and_the_step_counts() -> None:
    def watch(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            explode("callback")

    batches = batches_of(MLP, ROWS, torch.float32, 4)
    with phalanx.Trainer(
        mlp(), MLP.loss, sgd, microbatches=None, replicas=2, callbacks=[watch]
    ) as trainer:
        with pytest.raises(Boom):
            trainer.fit(Loader(batches))
        assert trainer.steps == 2
        trainer.step(batches[2])
        assert trainer.steps == 3


def test_an_exception_of_the_loader_arrives() -> None:
    def broken() -> Iterator[Any]:
        yield vector_batch(ROWS)
        explode("loader")

    with phalanx.Trainer(mlp(), MLP.loss, sgd, microbatches=None, replicas=2) as trainer:
        with pytest.raises(Boom):
            trainer.fit(broken())
        assert trainer.steps == 1
        trainer.step(vector_batch(ROWS))


# --- DataParallel ---------------------------------------------------------------------------------


class TestDataParallel:
    def model(self, net: nn.Module, replicas: int = 3) -> phalanx.DataParallel:
        return phalanx.DataParallel(net, devices=["cpu"] * replicas)

    def test_forward_raises_what_the_replica_raised(self) -> None:
        net = Fused("forward")
        before = state_of(net)
        with self.model(net) as model:
            with pytest.raises(Boom) as caught:
                model(marked_batch(7)[0])  # 16 rows are cut 6, 5, 5: row 7 is replica 1's
            assert "explode" in functions_in(caught.value)
            assert "replica 1" in notes_of(caught.value)
            assert "microbatch 1" in notes_of(caught.value)
            assert_same_bits(state_of(net), before)
            model(vector_batch(ROWS)[0]).sum().backward()
        assert all(gradient is not None for gradient in gradients_of(net))

    def test_backward_raises_what_the_replica_raised_and_adds_no_gradient(self) -> None:
        net = Fused("backward")
        x, targets = marked_batch(12)
        loss = loss_for("backward")
        with self.model(net) as model:
            loss(model(vector_batch(ROWS)[0]), vector_batch(ROWS)[1]).backward()
            before = gradients_of(net)
            outputs = model(x)
            with pytest.raises(Boom) as caught:
                loss(outputs, targets).backward()
            assert (caught.value.code, caught.value.where) == (7, "backward")
            assert "explode" in functions_in(caught.value)
            assert "replica 2" in notes_of(caught.value)
            assert_same_bits(gradients_of(net), before)
            model.zero_grad()
            loss(model(vector_batch(ROWS)[0]), vector_batch(ROWS)[1]).backward()
        assert all(gradient is not None for gradient in gradients_of(net))


# --- stopping -------------------------------------------------------------------------------------


def house_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("phalanx"))


@pytest.fixture
def threads_before() -> list[str]:
    return house_threads()


@pytest.mark.parametrize("failing", [False, True])
def test_no_thread_is_left_after_close(failing: bool, threads_before: list[str]) -> None:
    trainer = phalanx.Trainer(Fused("forward"), loss_for(""), sgd, microbatches=None, replicas=3)
    if failing:
        with pytest.raises(Boom):
            trainer.step(marked_batch(4))
    trainer.step(vector_batch(ROWS))
    assert set(house_threads()) >= {f"phalanx-replica-{index}" for index in range(3)}
    trainer.close()
    assert house_threads() == threads_before
    trainer.close()


def test_stop_finishes_the_step_and_fit_returns() -> None:
    seen: list[StepDone] = []

    def watch(event: object) -> None:
        if isinstance(event, StepDone):
            seen.append(event)
            if event.step == 3:
                trainer.stop()

    batches = batches_of(MLP, ROWS, torch.float32, 5)
    with phalanx.Trainer(
        mlp(), MLP.loss, sgd, microbatches=None, replicas=2, callbacks=[watch]
    ) as trainer:
        assert not trainer.stopped
        trainer.fit(Loader(batches), epochs=2)
        assert trainer.stopped
        assert (trainer.steps, trainer.epochs) == (3, 0)
        assert [event.step for event in seen] == [1, 2, 3]


def test_stop_may_be_called_from_another_thread() -> None:
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
    with phalanx.Trainer(
        mlp(), MLP.loss, sgd, microbatches=None, replicas=2, callbacks=[watch]
    ) as trainer:
        stopper.start()
        trainer.fit(Loader(batches), epochs=100)
        assert trainer.steps == 2


def test_ctrl_c_while_weights_are_stepped_arrives_after_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_shard, interrupted = Shards.step, []

    def interrupt(self: Shards, shard: int, scale: float) -> None:
        if shard == 1:
            interrupted.append(threading.current_thread())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        step_shard(self, shard, scale)

    def new_trainer() -> phalanx.Trainer:
        return phalanx.Trainer(mlp(), MLP.loss, adamw, replicas=3, microbatches=MICROBATCHES)

    with new_trainer() as trainer, new_trainer() as undisturbed:
        for each in (trainer, undisturbed):
            each.step(vector_batch(ROWS))
        monkeypatch.setattr(Shards, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(vector_batch(ROWS, seed=1))
        monkeypatch.undo()
        undisturbed.step(vector_batch(ROWS, seed=1))
        assert trainer.steps == 2
        assert_same_bits(whole_state(trainer), whole_state(undisturbed))
    assert len(interrupted) == 1


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


def interrupt_again_and_again(parent: Parent) -> None:
    """Run in a process of its own, so that a hang is one failed test and not the end of all."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    armed = threading.Event()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if armed.is_set() and bool((targets == 3).any()):
            armed.clear()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return MLP.loss(outputs, targets)

    with phalanx.Trainer(mlp(), loss, adamw, replicas=2, microbatches=MICROBATCHES) as trainer:
        trainer.step(vector_batch(ROWS))
        for place in range(INTERRUPTS):
            # The signal comes while one microbatch or another is computed, the last one too.
            x, _ = vector_batch(ROWS, seed=place)
            targets = torch.zeros(ROWS, dtype=torch.long)
            targets[place % ROWS] = 3
            before = whole_state(trainer)
            armed.set()
            try:
                trainer.step((x, targets))
                raise AssertionError("the interrupt was lost")
            except KeyboardInterrupt:
                after = whole_state(trainer)
            # The step was undone, or it was finished; not half of it.
            assert after[2] in (before[2], before[2] + 1)
            if after[2] == before[2]:
                assert_same_bits(after, before)
            done = trainer.step(vector_batch(ROWS, seed=2))
            assert done.step == after[2] + 1
            assert torch.isfinite(torch.tensor(done.loss))
    assert house_threads() == []
    parent.tell("well")


@pytest.mark.skipif(
    sys.version_info >= (3, 13),
    reason="Python 3.13 delivers signals late in forks of a thread, as the tests' children are",
)
def test_ctrl_c_while_the_replicas_compute_leaves_a_usable_trainer() -> None:
    """The signal comes while the main thread waits for replicas that hold the model's memory.

    Every place of the wait must bear it: also the moment between the last replica's word and its
    being heard.
    """
    with Children() as children:
        child = children.start(interrupt_again_and_again)
        assert child.get() == "well", "the trainer hangs after Ctrl-C"


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
