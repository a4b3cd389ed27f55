"""Schedulers and optimizers: instances or functions, stepped as in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

import phalanx
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("schedulers")

EPOCHS = 3


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 3, generator=draw), torch.randn(5, 2, generator=draw)) for _ in range(count)
    ]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def make(module: nn.Module, optimizer: Any = momentum, **options: Any) -> phalanx.Trainer:
    options = {"executor": "inline", "replicas": 1, "microbatches": 1, **options}
    return phalanx.Trainer(module, F.mse_loss, optimizer, **options)


def plain(module: nn.Module, optimizer: Any, scheduler: LRScheduler | None, interval: str) -> None:
    """Train as a loop of one's own does."""
    for _ in range(EPOCHS):
        for x, y in data():
            optimizer.zero_grad()
            F.mse_loss(module(x), y).backward()
            optimizer.step()
            if scheduler is not None and interval == "step":
                scheduler.step()
        if scheduler is not None and interval == "epoch":
            scheduler.step()


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


# -- when, and as what -------------------------------------------------------


@pytest.mark.parametrize("given", ["functions", "instances", "a function of an instance"])
@pytest.mark.parametrize("interval", [None, "epoch", "step"])
def test_a_scheduler_is_stepped_when_it_is_said(given: str, interval: str | None) -> None:
    ours, twin = net(), net()
    reference = momentum(twin.parameters())
    plain(twin, reference, StepLR(reference, 1, 0.5), interval or "epoch")
    optimizer: Any = momentum
    scheduler: Any = lambda optimizer: StepLR(optimizer, 1, 0.5)  # noqa: E731
    if given != "functions":
        optimizer = momentum(ours.parameters())
    if given == "instances":
        scheduler = scheduler(optimizer)
    options = {} if interval is None else {"scheduler_interval": interval}
    with make(ours, optimizer, scheduler=scheduler, **options) as trainer:
        trainer.fit(data(), epochs=EPOCHS)
        assert trainer.optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert_same(ours, twin)


@pytest.mark.parametrize("executor", ["inline", "threads"])
def test_an_optimizer_that_has_trained_goes_on_with_its_own_state(executor: str) -> None:
    ours, twin = net(), net()
    optimizer, reference = (
        torch.optim.AdamW(
            [{"params": [each.weight], "lr": 0.1}, {"params": [each.bias]}],  # type: ignore[list-item]
            lr=0.01,
            betas=(0.8, 0.9),
        )
        for each in (ours, twin)
    )
    plain(ours, optimizer, None, "epoch")
    plain(twin, reference, None, "epoch")
    with make(ours, optimizer, executor=executor) as trainer:
        assert trainer.optimizer is optimizer
        trainer.fit(data(), epochs=EPOCHS)
    plain(twin, reference, None, "epoch")
    for one, other in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)  # flat parts round otherwise than torch's tensors


def test_a_schedule_by_epochs_resumes_in_the_middle_of_one(tmp_path: Path) -> None:
    schedule = lambda optimizer: StepLR(optimizer, 2, 0.5)  # noqa: E731
    whole, first, then = net(), net(), net()
    with make(whole, scheduler=schedule) as trainer:
        trainer.fit(data(), epochs=5)
    with make(first, scheduler=schedule) as trainer:
        trainer.fit(data(), steps=10)
        trainer.save(tmp_path / "c")
    with make(then, scheduler=schedule) as trainer:
        trainer.resume(tmp_path / "c")
        trainer.fit(data(), epochs=5)
    assert_same(whole, then)


class Stateless:
    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("scheduler", "interval", "match"),
    [
        (lambda o: [StepLR(o, 1), StepLR(o, 2)], "epoch", "must be one torch scheduler"),
        (lambda _: Stateless(), "epoch", "Stateless object"),
        (lambda _: None, "epoch", "but is or returned None"),
        (StepLR(momentum(net().parameters()), 1), "epoch", "of the trainer's optimizer"),
        (lambda o: StepLR(o, 1), "batch", "`scheduler_interval` must be 'epoch' or 'step'"),
        (ReduceLROnPlateau, "step", "must be 'epoch' for ReduceLROnPlateau"),
    ],
)
def test_schedulers_that_cannot_work_are_refused_at_once(
    scheduler: Any, interval: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make(net(), scheduler=scheduler, scheduler_interval=interval)


# -- schedule-free ----------------------------------------------------------------


class ScheduleFree(torch.optim.Optimizer):
    """SGD that moves the weights to an average to be evaluated, and back, as Defazio does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "train_mode": False, "count": 0})

    @torch.no_grad()
    def _move(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                for p in group["params"]:
                    if p in self.state:
                        p.lerp_(self.state[p]["z"], 0.1 if to_train else 1 - 1 / 0.9)
                group["train_mode"] = to_train

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["count"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["count"])
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["count"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def loss_of(module: nn.Module) -> float:
    return sum(F.mse_loss(module(x), y).item() for x, y in data()) / len(data())


@pytest.mark.parametrize("executor", ["inline", "threads"])
def test_a_schedule_free_optimizer_is_switched_around_validation(executor: str) -> None:
    twin = net()
    reference = ScheduleFree(twin.parameters())
    expected = []
    for _ in range(EPOCHS):
        reference.train()
        for x, y in data():
            reference.zero_grad()
            F.mse_loss(twin(x), y).backward()
            reference.step()
        trained = copy.deepcopy(twin.state_dict())
        reference.eval()
        expected.append(loss_of(twin))
        reference.train()
        twin.load_state_dict(trained)
    ours = net()
    with make(ours, ScheduleFree, executor=executor) as trainer:
        found = trainer.fit(data(), epochs=EPOCHS, validate=data())
    assert [each.validation["loss"] for each in found if each.validation] == pytest.approx(expected)
    assert_same(ours, twin)


@pytest.mark.parametrize("executor", ["inline", "threads"])
def test_looking_at_a_schedule_free_run_changes_no_bit(executor: str, tmp_path: Path) -> None:
    rows = data(12)
    whole, looked_at, resumed = net(), net(), net()
    with make(whole, ScheduleFree, executor=executor) as trainer:
        trainer.fit(rows)
    with make(looked_at, ScheduleFree, executor=executor) as trainer:
        trainer.fit(rows, steps=5)
        trainer.save(tmp_path / "c")
        trainer.evaluate(rows)
        trainer.predict(rows)
        with pytest.raises(ConfigError, match="`loader`"):
            trainer.evaluate([])
        trainer.fit(rows)
    with make(resumed, ScheduleFree, executor=executor) as trainer:
        trainer.resume(tmp_path / "c")
        trainer.evaluate(rows)
        trainer.fit(rows)
    assert_same(whole, looked_at)
    assert_same(whole, resumed)
