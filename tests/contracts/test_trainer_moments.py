"""What may be called when: in callbacks, in the middle of a step, between two calls of `fit`.

What a microbatch calls itself runs inline and in threads only: a worker process has no trainer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.callbacks import EMA, History, StepDone
from phalanx.errors import StateError
from phalanx.train import trainer as trainer_module
from tests.interrupts import interrupt_at
from tests.products import some_by_day
from tests.worlds import EXECUTORS, WORLDS_BY_DAY, World, in_every_executor, in_executor_worlds

DEADLINE_S = 30
in_this_process = pytest.mark.parametrize(("executor", "replicas"), EXECUTORS[:2])


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(7, 5, generator=draw), torch.randn(7, 3, generator=draw)) for _ in "abcde"]


def make(build: Callable[[], nn.Module] | None = None, **options: Any) -> phalanx.Trainer:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    return phalanx.Trainer(
        net if build is None else build(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        **{"replicas": 2, "microbatches": 3, **options},
    )


def state_of(trainer: phalanx.Trainer) -> list[Tensor]:
    return [value.clone() for value in trainer.module.state_dict().values()]


def undisturbed(steps: int) -> list[Tensor]:
    with make() as trainer:
        trainer.fit(batches(), steps=steps)
        return state_of(trainer)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


class Calling(nn.Module):
    """A model that calls something in the middle of its forward pass, once."""

    calls: ClassVar[list[Callable[[], object]]] = []  # of the class: replicas are copies
    heard: ClassVar[list[Exception]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:  # one replica makes them all
            calls = self.calls[:]
            self.calls.clear()
        for call in calls:
            try:
                call()
            except StateError as error:
                self.heard.append(error)
        out: Tensor = self.lin(x)
        return out


# -- in callbacks -------------------------------------------------------


def closed_in_a_callback(executor: str, replicas: int) -> tuple[int, list[Tensor]]:
    def close(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            trainer.close()

    before = set(threading.enumerate())
    trainer = make(executor=executor, replicas=replicas, callbacks=[close])
    with pytest.raises(StateError, match="was closed"):
        trainer.fit(batches(), epochs=2)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left <= {"phalanx collectives"}  # of the group, which stays
    return trainer.steps, state_of(trainer)


@in_executor_worlds
def test_a_trainer_that_is_closed_in_a_callback_trains_no_further(world: World, n: int) -> None:
    for steps, state in world.run(closed_in_a_callback, n):
        assert steps == 3
        assert same(state, undisturbed(3))


def gone_back_in_a_callback(
    executor: str, replicas: int, folder: Path
) -> tuple[list[int], list[Tensor]]:
    seen: list[int] = []

    def go_back(event: object) -> None:
        if isinstance(event, StepDone):
            seen.append(event.batch)
            if len(seen) == 2:
                trainer.save(folder)
            if len(seen) == 4:
                trainer.resume(folder)

    with make(executor=executor, replicas=replicas, callbacks=[go_back]) as trainer:
        trainer.fit(batches(), epochs=2)
        return seen, state_of(trainer)


@in_executor_worlds
def test_going_back_in_a_callback_reads_the_data_from_there(
    world: World, n: int, tmp_path: Path
) -> None:
    for seen, state in world.run(gone_back_in_a_callback, n, folder=tmp_path / "c"):
        assert seen == [1, 2, 3, 4, 3, 4, 5, 1, 2, 3, 4, 5]
        assert same(state, undisturbed(10))


# -- in the middle of a step --------------------------------------------


@in_this_process
def test_in_the_middle_of_a_step_nothing_is_saved_or_put_back(
    executor: str, replicas: int, tmp_path: Path
) -> None:
    Calling.heard.clear()
    with make(Calling, executor=executor, replicas=replicas) as trainer:
        trainer.save(tmp_path / "before")
        Calling.calls += [
            lambda: trainer.save(tmp_path / "torn"),
            lambda: trainer.resume(tmp_path / "before"),
        ]
        trainer.fit(batches(), steps=1)
        said = "must be called between two steps, but one is called during a step"
        assert [said in str(error) for error in Calling.heard] == [True] * 2
        assert not (tmp_path / "torn").exists()
        trainer.save(tmp_path / "after")


@in_this_process
def test_closing_in_the_middle_of_a_step_lets_it_end(executor: str, replicas: int) -> None:
    with make(Calling) as twin:
        twin.fit(batches(), steps=2)
        expected = state_of(twin)
    trainer = make(Calling, executor=executor, replicas=replicas)
    trainer.fit(batches(), steps=1)
    Calling.calls.append(trainer.close)
    with pytest.raises(StateError, match="was closed"):
        trainer.fit(batches())
    assert trainer.steps == 2
    assert same(state_of(trainer), expected)
    evaluates = make(Calling, executor=executor, replicas=replicas)
    Calling.calls.append(evaluates.close)
    with pytest.raises(StateError, match="was closed"):
        evaluates.evaluate(batches())


# -- telling ------------------------------------------------------------


@in_every_executor
def test_after_a_step_that_failed_half_way_nothing_is_added_or_saved(
    executor: str, replicas: int, tmp_path: Path
) -> None:
    """Its weights are new and its position is not; a checkpoint is the way back."""
    with make(executor=executor, replicas=replicas) as trainer:
        trainer.fit(batches(), steps=2)
        trainer.save(tmp_path / "two steps")
        before = state_of(trainer)

        def fail(*_: object) -> None:
            raise MemoryError("just now")

        hook = trainer.optimizer.register_step_post_hook(fail)
        with pytest.raises(MemoryError, match="just now"):
            trainer.fit(batches(), steps=1)
        hook.remove()
        assert not same(before, state_of(trainer))
        for call in (
            lambda: trainer.fit(batches(), steps=1),
            lambda: trainer.step(batches()[0]),
            lambda: trainer.save(tmp_path / "another"),
        ):
            with pytest.raises(StateError, match=r"must be whole .* `resume"):
                call()
        assert not (tmp_path / "another").exists()
        trainer.resume(tmp_path / "two steps")
        assert same(before, state_of(trainer))
        trainer.fit(batches(), steps=2)
        assert same(state_of(trainer), undisturbed(4))


# -- one `fit` after another ----------------------------------------------


class Ends:
    """A callback that ends `fit` after a step, by ``how``, once."""

    def __init__(self, how: str, step: int) -> None:
        self.how = how
        self.step = step
        self.trainer: phalanx.Trainer | None = None

    def __call__(self, event: object) -> None:
        if self.trainer is not None and isinstance(event, StepDone) and event.step == self.step:
            trainer, self.trainer = self.trainer, None
            if self.how == "stop":
                trainer.stop()
            else:
                raise {"error": ValueError, "Ctrl-C": KeyboardInterrupt}[self.how]


IN_AN_EPOCH_OR_AT_ITS_END = [("stop", 3), ("error", 5), ("Ctrl-C", 7), ("stop", 10)]


def ended(how: str, step: int, **options: Any) -> phalanx.Trainer:
    """Return a trainer whose `fit` of 9 epochs of 5 batches was ended after ``step``."""
    ends = Ends(how, step)
    trainer = make(callbacks=[ends], **options)
    ends.trainer = trainer
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        trainer.fit(batches(), epochs=9)
    assert trainer.steps == step
    return trainer


def asked_again(executor: str, replicas: int, how: str, step: int) -> None:
    options = {"executor": executor, "replicas": replicas}
    with ended(how, step, **options) as trainer:
        before = trainer.epochs
        assert len(trainer.fit(batches())) == 1
        assert len(trainer.fit(batches(), epochs=before + 3)) == 2
        assert trainer.steps == 5 * (before + 3)
    with ended(how, step, **options) as trainer:
        for number in reversed(range(12)):  # a Ctrl-C before the first step
            with contextlib.suppress(KeyboardInterrupt), interrupt_at(number, trainer_module):
                trainer.fit(batches(), steps=100)
        assert trainer.steps == step
        trainer.fit(batches(), steps=4)
        assert trainer.steps == step + 4


@some_by_day("world, end", WORLDS_BY_DAY, IN_AN_EPOCH_OR_AT_ITS_END)
def test_fit_does_what_it_is_asked_whatever_ended_the_one_before(
    world: tuple[World, int], end: tuple[str, int]
) -> None:
    start, n = world
    start.run(asked_again, n, how=end[0], step=end[1])


def counted(executor: str, replicas: int, how: str, step: int, folder: Path) -> None:
    options = {"executor": executor, "replicas": replicas}
    with ended(how, step, **options) as trainer:
        trainer.save(folder)
    seen: list[object] = []
    with make(callbacks=[seen.append], **options) as trainer:
        trainer.resume(folder)
        done = trainer.fit(batches(), epochs=4)
        assert [each.epoch for each in done] == list(range(trainer.epochs - len(done) + 1, 5))
        assert (trainer.epochs, trainer.steps) == (4, 20)
        numbers = [(each.epoch, each.batch) for each in seen if isinstance(each, StepDone)]
        assert numbers == [(1 + at // 5, 1 + at % 5) for at in range(step, 20)]
        assert len(trainer.fit(batches())) == 1  # the running one


@pytest.mark.promise("epochs-count-from-the-start")
@some_by_day("world, end", WORLDS_BY_DAY, IN_AN_EPOCH_OR_AT_ITS_END)
def test_epochs_are_counted_from_the_start_of_the_run(
    world: tuple[World, int], end: tuple[str, int], tmp_path: Path
) -> None:
    start, n = world
    start.run(counted, n, how=end[0], step=end[1], folder=tmp_path / "c")


def asked_for_fewer(executor: str, replicas: int) -> None:
    seen: list[object] = []
    with make(executor=executor, replicas=replicas, callbacks=[seen.append]) as trainer:
        trainer.fit(batches(), epochs=2)
        before = state_of(trainer)
        seen.clear()
        for epochs in (1, 2):
            with pytest.warns(UserWarning, match="more than the 2 that the run has finished"):
                assert trainer.fit(iter(()), epochs=epochs) == []
        assert (trainer.epochs, trainer.steps, seen) == (2, 10, [])
        assert same(state_of(trainer), before)


@pytest.mark.promise("epochs-count-from-the-start")
@in_executor_worlds
def test_fewer_epochs_than_are_done_are_none_and_it_says_so(world: World, n: int) -> None:
    world.run(asked_for_fewer, n)


def test_a_step_of_a_signals_handler_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(metrics={"mse": nn.functional.mse_loss}) as trainer:
        first, counts = trainer.step(batches()[0]), trainer._metrics.state_dict
        step = lambda: (trainer.step(batches()[first.step]), counts())[1]  # noqa: E731
        monkeypatch.setattr(trainer._metrics, "state_dict", step)  # before each batch's step
        assert trainer.fit(batches(), epochs=1)[0].steps == 1 + 2 * 5


# -- Ctrl-C in the middle of an update ----------------------------------------


class Signalled(torch.optim.SGD):
    """Gets signals in its step, once, each when the one before was handled."""

    armed: ClassVar[list[signal.Signals]] = []
    handled: ClassVar[threading.Event] = threading.Event()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.fire()

    @classmethod
    def fire(cls) -> None:
        while cls.armed:
            cls.handled.clear()
            os.kill(os.getpid(), cls.armed.pop())
            if threading.current_thread() is not threading.main_thread():
                assert cls.handled.wait(DEADLINE_S)


class SignalledScheduler(torch.optim.lr_scheduler.StepLR):
    def step(self, epoch: int | None = None) -> None:
        Signalled.fire()
        super().step()


class SignalledNet(nn.Linear):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        Signalled.fire()
        return super().parameters(recurse)


@some_by_day(
    "executor, signals, how",
    EXECUTORS,
    [[signal.SIGINT], [signal.SIGALRM], [signal.SIGINT] * 2],
    ["optimizer", "scheduler", "average", "epoch"],
)
def test_ctrl_c_in_the_update_comes_after_it(
    executor: tuple[str, int], signals: list[signal.Signals], how: str, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        Signalled.handled.set()
        raise KeyboardInterrupt

    averages, histories = (EMA(0.5), EMA(0.5)), (History(), History())

    def trainer(number: int) -> phalanx.Trainer:
        torch.manual_seed(0)
        made = Signalled if how == "optimizer" else torch.optim.SGD
        return phalanx.Trainer(
            (SignalledNet if how == "average" else nn.Linear)(5, 3),
            nn.functional.mse_loss,
            lambda parameters: made(parameters, lr=0.1),
            executor=executor[0],
            replicas=executor[1],
            microbatches=3,
            scheduler=lambda optimizer: SignalledScheduler(optimizer, 2),
            scheduler_interval="epoch" if how == "epoch" else "step",
            callbacks=[averages[number], histories[number]],
        )

    before = [signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGALRM)]
    try:
        with trainer(0) as disturbed, trainer(1) as undisturbed:
            for done in (disturbed, undisturbed):
                done.fit(batches(), steps=4)
            Signalled.armed.extend(signals)
            threads = set(threading.enumerate())
            with pytest.raises(KeyboardInterrupt):
                disturbed.fit(batches(), steps=1)
            assert disturbed.steps == 5
            assert set(threading.enumerate()) == threads  # a pool that is left behind ends
            assert signal.getsignal(signal.SIGINT) is interrupt
            disturbed.save(tmp_path / "c")
            undisturbed.fit(batches(), steps=1)
            for done in (disturbed, undisturbed):
                done.fit(batches(), steps=3)
            assert same(state_of(disturbed), state_of(undisturbed))
            assert same(*[[*each.module.parameters()] for each in averages])
            means = [(each.losses, [done.train for done in each.epochs]) for each in histories]
            assert means[0] == means[1]
    finally:
        Signalled.armed.clear()
        for number, handler in zip((signal.SIGINT, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_ctrl_c_in_a_microbatch_comes_after_it(number: int, request: pytest.FixtureRequest) -> None:
    before = signal.signal(number, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, before))
    finished = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if not finished:
            signal.raise_signal(number)
        finished.append(outputs)
        return {1: nn.functional.mse_loss(outputs, targets)}[len(finished)]  # the second fails

    with pytest.raises(KeyboardInterrupt) as raised, trainer_inline(loss) as trainer:
        trainer.step(batches()[0])
    assert (trainer.steps, len(finished), type(raised.value.__context__)) == (0, 2, KeyError)


def test_a_second_ctrl_c_in_a_microbatch_comes_at_once() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    with pytest.raises(KeyboardInterrupt), trainer_inline(loss) as trainer:
        trainer.step(batches()[0])


def trainer_inline(fn: Callable[[Tensor, Tensor], Tensor]) -> phalanx.Trainer:
    return phalanx.Trainer(nn.Linear(5, 3), fn, torch.optim.SGD, microbatches=2, executor="inline")
