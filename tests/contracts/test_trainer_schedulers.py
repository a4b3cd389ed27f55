"""Schedulers and optimizers: instances or functions, stepped as in plain PyTorch.

What is refused is refused when a trainer is made, before any executor has begun.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

import phalanx
from phalanx.errors import ConfigError
from tests.products import some_by_day
from tests.worlds import WORLDS_BY_DAY, World, in_executor_worlds
from tests.zoo import MLP, assert_close, assert_same_bits, batches_of, mlp, state_of

pytestmark = pytest.mark.promise("schedulers")

EPOCHS = 3


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return batches_of(MLP, 7, torch.float32, count)


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make(
    module: nn.Module,
    optimizer: Any = momentum,
    executor: str = "inline",
    replicas: int = 1,
    **options: Any,
) -> phalanx.Trainer:
    options = {"executor": executor, "replicas": replicas, "microbatches": 3, **options}
    return phalanx.Trainer(module, MLP.loss, optimizer, **options)


def plain(module: nn.Module, optimizer: Any, scheduler: LRScheduler | None, interval: str) -> None:
    """Train as a loop of one's own does."""
    for _ in range(EPOCHS):
        for x, y in data():
            optimizer.zero_grad()
            MLP.loss(module(x), y).backward()
            optimizer.step()
            if scheduler is not None and interval == "step":
                scheduler.step()
        if scheduler is not None and interval == "epoch":
            scheduler.step()


State = dict[str, Tensor]


# -- when, and as what -------------------------------------------------------


def scheduled(
    executor: str, replicas: int, given: str, interval: str | None
) -> tuple[float, State]:
    """Return the learning rate and the weights after some epochs."""
    module = mlp()
    optimizer: Any = momentum
    scheduler: Any = lambda optimizer: StepLR(optimizer, 1, 0.5)  # noqa: E731
    if given != "functions":
        optimizer = momentum(module.parameters())
    if given == "instances":
        scheduler = scheduler(optimizer)
    options = {} if interval is None else {"scheduler_interval": interval}
    with make(module, optimizer, executor, replicas, scheduler=scheduler, **options) as trainer:
        trainer.fit(data(), epochs=EPOCHS)
        return trainer.optimizer.param_groups[0]["lr"], state_of(module)


@some_by_day(
    "world, given, interval",
    WORLDS_BY_DAY,
    ["functions", "instances", "a function of an instance"],
    [None, "epoch", "step"],
)
def test_a_scheduler_is_stepped_when_it_is_said(
    world: tuple[World, int], given: str, interval: str | None
) -> None:
    twin = mlp()
    reference = momentum(twin.parameters())
    plain(twin, reference, StepLR(reference, 1, 0.5), interval or "epoch")
    start, n = world
    for rate, weights in start.run(partial(scheduled, given=given, interval=interval), n):
        assert rate == reference.param_groups[0]["lr"]
        assert_close(weights, state_of(twin), torch.float32)


def adamw_of_two_groups(module: nn.Module) -> torch.optim.AdamW:
    first, *others = module.parameters()
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.1}, {"params": others}], lr=0.01, betas=(0.8, 0.9)
    )


def trained_further(executor: str, replicas: int) -> State:
    module = mlp()
    optimizer = adamw_of_two_groups(module)
    plain(module, optimizer, None, "epoch")
    with make(module, optimizer, executor, replicas) as trainer:
        assert trainer.optimizer is optimizer
        trainer.fit(data(), epochs=EPOCHS)
        return state_of(module)


@in_executor_worlds
def test_an_optimizer_that_has_trained_goes_on_with_its_own_state(world: World, n: int) -> None:
    twin = mlp()
    reference = adamw_of_two_groups(twin)
    plain(twin, reference, None, "epoch")
    plain(twin, reference, None, "epoch")
    for weights in world.run(trained_further, n):
        assert_close(weights, state_of(twin), torch.float32, times=10)


def halves_every_second_epoch(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 2, 0.5)


def across_a_resume(executor: str, replicas: int, folder: Path) -> tuple[State, State]:
    """Return the weights that were trained at once, and with a stop in an epoch's middle."""
    how = {"executor": executor, "replicas": replicas, "scheduler": halves_every_second_epoch}
    with make(mlp(), **how) as trainer:
        trainer.fit(data(), epochs=5)
        whole = state_of(trainer.module)
    with make(mlp(), **how) as trainer:
        trainer.fit(data(), epochs=5, steps=10)
        trainer.save(folder)
    with make(mlp(seed=1), **how) as trainer:
        trainer.resume(folder)
        trainer.fit(data(), epochs=5)
        return whole, state_of(trainer.module)


@in_executor_worlds
def test_a_schedule_by_epochs_resumes_in_the_middle_of_one(
    world: World, n: int, tmp_path: Path
) -> None:
    for whole, resumed in world.run(across_a_resume, n, folder=tmp_path / "c"):
        assert_same_bits(resumed, whole)


class Stateless:
    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("scheduler", "interval", "match"),
    [
        (lambda o: [StepLR(o, 1), StepLR(o, 2)], "epoch", "must be one torch scheduler"),
        (lambda _: Stateless(), "epoch", "Stateless object"),
        (lambda _: None, "epoch", "but is or returned None"),
        (StepLR(momentum(mlp().parameters()), 1), "epoch", "of the trainer's optimizer"),
        (lambda o: StepLR(o, 1), "batch", "`scheduler_interval` must be 'epoch' or 'step'"),
        (ReduceLROnPlateau, "step", "must be 'epoch' for ReduceLROnPlateau"),
    ],
)
def test_schedulers_that_cannot_work_are_refused_at_once(
    scheduler: Any, interval: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make(mlp(), scheduler=scheduler, scheduler_interval=interval)
