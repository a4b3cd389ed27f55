"""The trainer's gradient, loss and metrics are those of the whole batch, however it was cut.

Clipping is torch's, too. Comparisons are in float64, so that a wrong weight, an error of per cents,
cannot hide in the tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.callbacks import EpochDone, StepDone
from tests.products import some_by_day
from tests.worlds import WORLDS_BY_DAY, World, in_executor_worlds
from tests.zoo import (
    MLP,
    Loader,
    adamw,
    assert_close,
    batches_of,
    gpt,
    mlp,
    plain_sgd,
    plain_steps,
    sgd,
    state_of,
    token_batch,
    token_loss,
    twin_of,
    vector_batch,
)

pytestmark = pytest.mark.promise("whole-batch-gradients")

F64 = torch.float64
Forward = Callable[[nn.Module, Any], Any]


def masked_tokens(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch whose rows count 0 to 5 tokens each; the first third count none at all."""
    tokens, targets = token_batch(rows)
    targets = targets.clone()
    for row in range(rows):
        kept = 0 if row < rows // 3 else 1 + row % targets.shape[1]
        targets[row, kept:] = -100
    return tokens, targets


def count_tokens(microbatch: tuple[Tensor, Tensor]) -> int:
    return int((microbatch[1] != -100).sum())


def weighted_batch(rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    x, classes = vector_batch(rows, F64)
    return x, {"classes": classes, "weights": torch.linspace(0.01, 3.7, rows, dtype=F64)}


def weighted_loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Return a mean weighted by what the targets say."""
    each = F.cross_entropy(outputs, targets["classes"], reduction="none")
    return (each * targets["weights"]).sum() / targets["weights"].sum()


def sum_of_weights(microbatch: tuple[Tensor, dict[str, Tensor]]) -> float:
    return microbatch[1]["weights"].sum().item()


def by_forward(loss: Callable[..., Tensor], *, outputs: bool) -> Forward:
    """Return a function for `forward=` that returns the loss, and the outputs if asked."""

    def forward(module: nn.Module, batch: tuple[Tensor, Any]) -> Any:
        made = module(batch[0])
        value = loss(made, batch[1])
        return (value, made) if outputs else value

    return forward


@dataclass(frozen=True)
class Step:
    """A batch, a model and a loss, and how a trainer is to compute the gradient."""

    build: Callable[[torch.dtype], nn.Module]
    loss: Callable[..., Tensor]
    batch: tuple[Any, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def trainer(self, optimizer: Any = plain_sgd, **options: Any) -> phalanx.Trainer:
        options = {**self.options, **options}
        loss = None if "forward" in options else self.loss
        return phalanx.Trainer(self.build(F64), loss, optimizer, **options)


def rows(number: int, microbatches: int | None) -> Step:
    return Step(mlp, MLP.loss, vector_batch(number, F64), {"microbatches": microbatches})


def tokens(microbatches: int | None, **options: Any) -> Step:
    options = {"microbatches": microbatches, "weight": count_tokens, **options}
    return Step(gpt, token_loss, masked_tokens(9), options)


STEPS_BY_NAME = {
    "7 rows in 4": rows(7, 4),
    "64 rows in 7": rows(64, 7),
    "2 rows in 3": rows(2, 3),  # one is empty
    "3 rows in 3": rows(3, 3),
    "slices": rows(7, None),
    "1 row": rows(1, None),  # replicas without rows add nothing
    # A microbatch without a token that counts has a loss of nan; it stands for nothing.
    "tokens in 4": tokens(4),
    "tokens in 9": tokens(9),
    "tokens in slices": tokens(None),
    "weights": Step(
        mlp, weighted_loss, weighted_batch(9), {"microbatches": 4, "weight": sum_of_weights}
    ),
    "forward": Step(
        mlp, MLP.loss, vector_batch(9, F64), {"forward": by_forward(MLP.loss, outputs=True)}
    ),
    "forward of a loss": tokens(5, forward=by_forward(token_loss, outputs=False)),
}
Found = tuple[dict[str, Tensor], float, int, float]


def one_step(executor: str, replicas: int, name: str) -> Found:
    """Return the gradient, which descent at rate 1 takes away, and what was told of the step."""
    step = STEPS_BY_NAME[name]
    with step.trainer(executor=executor, replicas=replicas) as trainer:
        before = state_of(trainer.module)
        event = trainer.step(step.batch)
        after = state_of(trainer.module)
        evaluated = trainer.evaluate([step.batch])["loss"]
    return {key: before[key] - after[key] for key in before}, event.loss, event.samples, evaluated


def by_torch(name: str) -> Found:
    step = STEPS_BY_NAME[name]
    net, (inputs, targets) = step.build(F64), step.batch
    loss = step.loss(net(inputs), targets)
    loss.backward()
    gradients = {key: p.grad for key, p in net.named_parameters() if p.grad is not None}
    plain_sgd(net.parameters()).step()
    evaluated = step.loss(net(inputs), targets).item()
    return gradients, loss.item(), len(inputs), evaluated


# --- the gradient of the whole batch --------------------------------------------------------------


@some_by_day("world, name", WORLDS_BY_DAY, list(STEPS_BY_NAME))
def test_gradient_and_loss_are_those_of_the_whole_batch(
    world: tuple[World, int], name: str
) -> None:
    gradients, loss, samples, evaluated = by_torch(name)
    start, n = world
    for found in start.run(one_step, n, name=name):
        assert_close(found[0], gradients, F64)
        assert found[1] == pytest.approx(loss, rel=1e-12)
        assert found[2] == samples
        assert found[3] == pytest.approx(evaluated, rel=1e-10)


def test_without_the_weight_masked_tokens_would_come_out_wrong() -> None:
    """The control of the tests above: rows and tokens do differ here."""
    inputs, targets = masked_tokens(9)
    step, net = Step(gpt, token_loss, (inputs[3:], targets[3:])), gpt(F64)
    with step.trainer(replicas=2, microbatches=3) as trainer:
        trainer.step(step.batch)
        plain_steps(net, token_loss, plain_sgd, [step.batch])
        assert (trainer.module.head.weight - net.head.weight).abs().max() > 1e-4  # type: ignore[union-attr]


# --- epochs ---------------------------------------------------------------------------------------

ROWS_OF_AN_EPOCH = (8, 8, 7, 1)  # the last has fewer rows than there are microbatches


def epoch_batches() -> list[tuple[Tensor, Tensor]]:
    return [vector_batch(number, F64, seed=number) for number in ROWS_OF_AN_EPOCH]


def three_epochs(executor: str, replicas: int) -> tuple[Any, ...]:
    seen: list[Any] = []
    with phalanx.Trainer(
        mlp(F64), MLP.loss, adamw, executor=executor, replicas=replicas, callbacks=[seen.append]
    ) as trainer:
        epochs = trainer.fit(Loader(epoch_batches()), epochs=3)
        steps = [event for event in seen if isinstance(event, StepDone)]
        assert [event for event in seen if isinstance(event, EpochDone)] == epochs
        assert (trainer.steps, trainer.epochs) == (12, 3)
        return (
            state_of(trainer.module),
            [(each.step, each.epoch, each.batch, each.samples) for each in steps],
            [each.loss for each in steps],
            [(each.epoch, each.steps, each.samples) for each in epochs],
            [each.train["loss"] for each in epochs],
        )


@in_executor_worlds
def test_an_epoch_with_a_ragged_last_batch_equals_the_plain_loop(world: World, n: int) -> None:
    twin = mlp(F64)
    losses = plain_steps(twin, MLP.loss, adamw, epoch_batches() * 3)
    places = itertools.product(range(1, 4), zip(range(1, 5), ROWS_OF_AN_EPOCH, strict=True))
    numbers = [(i + 1, epoch, *batch) for i, (epoch, batch) in enumerate(places)]
    # An epoch's loss is the mean over samples, not over batches.
    products = [loss * number for loss, number in zip(losses, ROWS_OF_AN_EPOCH * 3, strict=True)]
    means = [sum(products[i : i + 4]) / 24 for i in (0, 4, 8)]
    for state, steps, of_steps, epochs, of_epochs in world.run(three_epochs, n):
        assert_close(state, state_of(twin), F64)
        assert steps == numbers
        assert of_steps == pytest.approx(losses, rel=1e-10)
        assert epochs == [(1, 4, 24), (2, 8, 24), (3, 12, 24)]
        assert of_epochs == pytest.approx(means, rel=1e-10)


def test_steps_by_hand_take_nothing_from_a_loader() -> None:
    """A fit goes on behind the last batch of its own epoch; a step by hand was none of them."""
    batches = batches_of(MLP, 8, F64, 3)
    net = mlp(F64)
    twin = twin_of(net)
    plain_steps(twin, MLP.loss, sgd, [batches[2], *batches])
    with phalanx.Trainer(net, MLP.loss, sgd, microbatches=None, replicas=2) as trainer:
        trainer.step(batches[2])
        (done,) = trainer.fit(Loader(batches))
        assert (trainer.steps, done.samples) == (4, 24)
        assert_close(state_of(trainer.module), state_of(twin), F64)


# --- what a step tells ----------------------------------------------------------------------------


def grouped(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Matrices decay; vectors do not, and learn faster."""
    listed = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in listed if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in listed if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-3,
    )


def rate_in_a_tensor(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=torch.tensor(0.125))


def adafactor(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


FACTORIES = {"groups": grouped, "tensor": rate_in_a_tensor, "adafactor": adafactor}
Told = tuple[dict[str, Tensor], list[float], list[tuple[float, ...]]]


def clipped(
    executor: str, replicas: int, name: str, clip_norm: float, microbatches: int | None = 4
) -> Told:
    """Return the weights, and the norms and learning rates that the steps have told."""
    with phalanx.Trainer(
        mlp(F64),
        MLP.loss,
        FACTORIES[name],
        executor=executor,
        replicas=replicas,
        microbatches=microbatches,
        clip_norm=clip_norm,
        scheduler=halving,
        scheduler_interval="step",
    ) as trainer:
        steps = [trainer.step(batch) for batch in batches_of(MLP, 9, F64, 5)]
        norms = [event.grad_norm or 0.0 for event in steps]
        return state_of(trainer.module), norms, [event.learning_rates for event in steps]


def clipped_by_torch(name: str, clip_norm: float) -> Told:
    net, norms, rates = mlp(F64), [], []
    optimizer = FACTORIES[name](net.parameters())
    schedule = halving(optimizer)
    for inputs, targets in batches_of(MLP, 9, F64, 5):
        optimizer.zero_grad()
        MLP.loss(net(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm).item())
        rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return state_of(net), norms, rates


def assert_told(found: Told, expected: Told) -> None:
    assert_close(found[0], expected[0], F64, times=10)
    assert found[1] == pytest.approx(expected[1], rel=1e-10)
    assert found[2] == expected[2]


@some_by_day("world, name", WORLDS_BY_DAY, list(FACTORIES))
def test_clipping_equals_torchs_and_a_step_tells_norm_and_learning_rates(
    world: tuple[World, int], name: str
) -> None:
    start, n = world
    for found in start.run(clipped, n, name=name, clip_norm=0.01):
        assert_told(found, clipped_by_torch(name, 0.01))


@pytest.mark.parametrize("microbatches", [None, 4])
def test_gradients_below_the_norm_are_left_as_they_are(microbatches: int | None) -> None:
    found = clipped("threads", 2, "groups", 1e6, microbatches)
    assert_told(found, clipped_by_torch("groups", 1e6))
