"""The configuration does not show in the bits.

With `microbatches` given, weights, buffers, optimizer state and losses are equal bit for bit for
any number of replicas, whoever is slow, and across a stop and a resume on another number of
replicas. Tolerance: none.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.callbacks import StepDone
from phalanx.cli.data import open_data
from phalanx.replicas import num_cores
from tests.zoo import (
    CNN_NORM,
    GPT_DROPOUT,
    MLP,
    Case,
    adamw,
    assert_same_bits,
    sgd,
    shuffled_loader,
    state_of,
)

pytestmark = pytest.mark.promise("replicas-change-no-bit")

STEPS = 10
MICROBATCHES = 8
# Five batches an epoch, the last one of 12 rows; 20 and 12 are no multiples of 8.
ROWS, BATCH_SIZE = 92, 20
STEPS_PER_EPOCH = 5
HANDOVER_S = 30.0  # a deadline, not a delay: the others need milliseconds


@dataclass(frozen=True)
class Recipe:
    case: Case
    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.case.name


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=2 * STEPS)


def warm_down(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


BY_STEP = {"scheduler_interval": "step"}
RECIPES = (
    Recipe(MLP, sgd),
    Recipe(CNN_NORM, adamw, {"clip_norm": 0.5, "scheduler": warm_up, **BY_STEP}),
    Recipe(GPT_DROPOUT, adamw, {"scheduler": warm_down, **BY_STEP}),
)
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=str)


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind."""

    weights: dict[str, Tensor]  # with buffers
    optimizer: dict[str, Any]
    losses: tuple[float, ...]
    shares: tuple[tuple[int, ...], ...] = ()


def train(
    recipe: Recipe,
    replicas: int,
    *,
    stop: int = STEPS,
    resume: Path | None = None,
    save: Path | None = None,
    laggard: Laggard | None = None,
    seed: int = 0,
    microbatches: int | None = MICROBATCHES,
    process_seed: int = 1234,
    **options: Any,
) -> Outcome:
    """Train until step ``stop`` is done, from the start or from the checkpoint in ``resume``."""
    # Nothing of a run that is resumed may come from anywhere but the checkpoint.
    net = recipe.case.build(seed=0 if resume is None else 99)
    if laggard is not None:
        net.register_forward_pre_hook(laggard.hook())
    done: list[StepDone] = []

    def watch(event: object) -> None:
        if isinstance(event, StepDone):
            done.append(event)
            if laggard is not None:
                laggard.armed = True
            if event.step == stop:
                trainer.stop()

    torch.manual_seed(process_seed if resume is None else 4321)
    with phalanx.Trainer(
        net,
        recipe.case.loss,
        recipe.optimizer,
        replicas=replicas,
        microbatches=microbatches,
        seed=seed,
        callbacks=[watch],
        **recipe.options,
        **options,
    ) as trainer:
        if resume is not None:
            trainer.resume(resume)
        loader = shuffled_loader(recipe.case, ROWS, BATCH_SIZE, seed=7 if resume is None else 8)
        trainer.fit(loader, epochs=1000)
        assert trainer.steps == stop
        if save is not None:
            trainer.save(save)
        return Outcome(
            state_of(trainer.module),
            _copied(trainer.optimizer.state_dict()),
            tuple(event.loss for event in done),
            tuple(event.shares for event in done),
        )


def _copied(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, value)


@functools.cache
def reference(recipe_name: str) -> Outcome:
    """Return what one replica leaves behind after all steps."""
    return train(next(recipe for recipe in RECIPES if str(recipe) == recipe_name), 1)


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert_same_bits(outcome.weights, expected.weights, "weights")
    assert_same_bits(outcome.optimizer, expected.optimizer, "optimizer")
    assert outcome.losses == expected.losses[-len(outcome.losses) :]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.night), 2, 3])
@EVERY_RECIPE
def test_the_number_of_replicas_does_not_show(recipe: Recipe, replicas: int) -> None:
    outcome = train(recipe, replicas)
    assert len(outcome.losses) == STEPS
    assert_same(outcome, reference(str(recipe)))


@pytest.mark.promise("automatic-choices-change-no-bit")
def test_fresh_runs_that_fix_nothing_and_runs_on_fixed_replicas_have_one_hash() -> None:
    """The README's example."""

    def digest(**options: Any) -> str:
        torch.manual_seed(0)
        digits = open_data("digits", batch_size=64, seed=0)
        layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)
        net = nn.Sequential(*layers, nn.Linear(16 * 36, 10))
        with phalanx.Trainer(net, nn.CrossEntropyLoss(), adamw, **options) as trainer:
            trainer.fit(digits.train, steps=4)
        weights = b"".join(each.numpy().tobytes() for each in net.state_dict().values())
        return hashlib.sha256(weights).hexdigest()

    runs = [{}, {}, {}, {"replicas": "auto"}, {"replicas": 1}, {"replicas": 2}, {"replicas": 4}]
    assert len({digest(**options) for options in runs}) == 1


def test_without_microbatches_one_replica_computes_on_all_cores() -> None:
    with phalanx.Trainer(MLP.build(), MLP.loss, sgd, microbatches=None) as trainer:
        assert len(trainer.devices) == 1
        assert trainer.intra_op == num_cores()
    with phalanx.Trainer(MLP.build(), MLP.loss, sgd) as trainer:
        assert len(trainer.devices) == min(4, num_cores())
        assert trainer.intra_op == 1


@pytest.mark.promise("fast-mode-repeats")
@EVERY_RECIPE
def test_a_run_without_microbatches_repeats(recipe: Recipe) -> None:
    first, second = (train(recipe, 3, microbatches=None) for _ in range(2))
    assert_same(second, first)


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Multiplies matrices in its step, so an autocast around it would show."""
    return torch.optim.Adafactor(parameters, lr=0.1)


def in_bfloat16(module: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return MLP.loss(module(batch[0]), batch[1])


@pytest.mark.parametrize(("executor", "replicas"), [("threads", 3), ("inline", 1)])
def test_autocast_around_a_step_is_around_the_forward_pass_alone(
    executor: str, replicas: int
) -> None:
    options: dict[str, Any] = {"replicas": replicas, "executor": executor, "microbatches": 4}
    with (
        phalanx.Trainer(
            MLP.build(), MLP.loss, adafactor, **{"microbatches": None, **options}
        ) as trainer,
        phalanx.Trainer(
            MLP.build(), None, adafactor, forward=in_bfloat16, **{"microbatches": None, **options}
        ) as other,
    ):
        for seed in range(3):
            batch = MLP.batch(12, seed=seed)
            other.step(batch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                trainer.step(batch)
        assert_same_bits(state_of(trainer.module), state_of(other.module), "weights")


@pytest.mark.parametrize("workloads", [[3, 1], [0, 1], [1, 100]])
def test_workloads_do_not_show(workloads: list[float]) -> None:
    recipe = RECIPES[1]
    assert_same(train(recipe, 2, workloads=workloads), reference(str(recipe)))


class Laggard:
    """A forward hook that holds one replica back until the others have begun all else in the step.

    So the replica `slow` computes at most one microbatch of every step, and the others take over
    the rest: the most unequal division there can be, without a clock. It counts from the second
    step on, because before the first one the trainer may try things out on fewer replicas.
    """

    def __init__(self, slow: int) -> None:
        self.name = f"phalanx-replica-{slow}"
        self.held = 0
        self.armed = False
        self._begun = 0
        self._condition = threading.Condition()

    def hook(self) -> Callable[..., None]:
        # A plain function: a copy of the module has the same one.
        def hold(module: nn.Module, args: Any) -> None:
            if not self.armed:
                return
            with self._condition:
                self._begun += 1
                self._condition.notify_all()
                if threading.current_thread().name != self.name:
                    return
                self.held += 1
                last_of_step = -(-self._begun // MICROBATCHES) * MICROBATCHES
                if not self._condition.wait_for(lambda: self._begun >= last_of_step, HANDOVER_S):
                    raise TimeoutError(f"nobody took over the microbatches of {self.name}")

        return hold


@pytest.mark.parametrize(
    ("replicas", "slow"), [pytest.param(2, 0, marks=pytest.mark.night), (2, 1), (3, 1)]
)
@EVERY_RECIPE
def test_a_slow_replica_does_not_show(recipe: Recipe, replicas: int, slow: int) -> None:
    laggard = Laggard(slow)
    outcome = train(recipe, replicas, laggard=laggard)
    assert laggard.held > 0, "the slow replica never computed anything: the test shows nothing"
    largest = -(-BATCH_SIZE // MICROBATCHES)
    assert all(shares[slow] <= largest for shares in outcome.shares[1:])
    assert_same(outcome, reference(str(recipe)))


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), pytest.param(2, 3, marks=pytest.mark.night), (3, 1)]
)
@EVERY_RECIPE
def test_a_stop_and_a_resume_on_other_replicas_do_not_show(
    recipe: Recipe, before: int, after: int, tmp_path: Path
) -> None:
    expected = reference(str(recipe))
    first = train(recipe, before, stop=8, save=tmp_path / "checkpoint")
    assert first.losses == expected.losses[:8]
    second = train(recipe, after, resume=tmp_path / "checkpoint")
    assert len(second.losses) == STEPS - 8
    assert_same(second, expected)


@pytest.mark.parametrize("stop", [1, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1])
def test_a_stop_at_the_border_of_an_epoch_does_not_show(stop: int, tmp_path: Path) -> None:
    recipe = RECIPES[0]
    train(recipe, 2, stop=stop, save=tmp_path / "checkpoint")
    assert_same(train(recipe, 1, resume=tmp_path / "checkpoint"), reference(str(recipe)))


def test_a_resumed_run_can_be_stopped_and_resumed_again(tmp_path: Path) -> None:
    recipe = RECIPES[2]
    train(recipe, 1, stop=4, save=tmp_path / "one")
    train(recipe, 3, stop=6, resume=tmp_path / "one", save=tmp_path / "two")
    train(recipe, 2, stop=8, resume=tmp_path / "two", save=tmp_path / "three")
    assert_same(train(recipe, 3, resume=tmp_path / "three"), reference(str(recipe)))


# --- controls: what must show does, or the tests above compare nothing with nothing ---------------


def differs(first: Outcome, second: Outcome) -> bool:
    return any(not torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


@EVERY_RECIPE
def test_the_number_of_microbatches_shows(recipe: Recipe) -> None:
    """Rounding depends on where sums are cut, so equal bits above are no accident."""
    assert differs(train(recipe, 2, microbatches=3), reference(str(recipe)))


def test_the_seed_shows() -> None:
    assert differs(train(RECIPES[2], 2, seed=1), reference(str(RECIPES[2])))


def test_the_process_own_generator_does_not_show() -> None:
    """The model's numbers come from the trainer's seed, not from what the process drew before."""
    recipe = RECIPES[2]
    assert_same(train(recipe, 2, process_seed=77), reference(str(recipe)))


class Looping(nn.Module):
    """Uses a layer several times under an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(5):
                x = torch.tanh(self.layer(x))
        return x.float()


def test_autocast_in_a_model_does_not_show() -> None:
    """Torch's cache of cast weights is one for all threads, and cleared by whoever leaves."""

    def trained(replicas: int) -> dict[str, Tensor]:
        torch.manual_seed(5)
        net = Looping()
        with phalanx.Trainer(
            net, nn.functional.mse_loss, sgd, replicas=replicas, microbatches=6
        ) as trainer:
            trainer.fit([(torch.randn(36, 16), torch.randn(36, 16)) for _ in range(12)])
        return state_of(net)

    assert_same_bits(trained(3), trained(1), "weights")
