"""What a loss or `forward=` holds may change between steps: worker processes follow, as threads."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.zoo import simple_sgd as sgd

F = nn.functional
GAIN = 1.0

pytestmark = [
    pytest.mark.filterwarnings("ignore:`replicas` should be at most"),
    pytest.mark.promise("attributes-are-followed"),
]


@dataclass(slots=True)
class Slotted:
    beta: float = 1.0


class Weighted:
    """A loss that holds one of everything."""

    def __init__(self) -> None:
        self.beta = 1.0
        self.tensor = torch.ones(1)
        self.large = torch.ones(30_000)
        self.array = np.ones(2)
        self.list, self.dict = [1.0], {"beta": 1.0}
        self.slotted = Slotted()
        self.terms: list[Callable[[Tensor], Tensor]] = [gained]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scale = self.beta * self.list[0] * self.dict["beta"] * float(self.array[1])
        scale *= self.slotted.beta * self.large[-1].item()
        loss = F.cross_entropy(outputs, targets) * scale * self.tensor.squeeze()
        return loss + sum([term(outputs) for term in self.terms])


def gained(outputs: Tensor) -> Tensor:
    return outputs.square().mean() * GAIN


def squared(outputs: Tensor) -> Tensor:
    return outputs.square().mean() * 0.1 * GAIN


def with_attribute(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * with_attribute.beta  # type: ignore[attr-defined]


def with_default(
    outputs: Tensor,
    targets: Tensor,
    cfg: dict[str, float] = {"beta": 1.0},  # noqa: B006 - a default that changes
    *,
    power: float = 1.0,
) -> Tensor:
    return F.cross_entropy(outputs, targets) ** power * cfg["beta"]


def calls_another(outputs: Tensor, targets: Tensor) -> Tensor:
    return with_attribute(outputs, targets) + with_default(outputs, targets)


class Taught:
    """A `forward=` that holds a teacher, such as a moving average or the other half of a GAN."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            told = self.teacher(batch[0])
        return F.cross_entropy(module(batch[0]), batch[1]) + F.mse_loss(module(batch[0]), told)


class Criterion(nn.Module):
    """A module whose loss is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.power = nn.Parameter(torch.ones(3))
        self.register_buffer("bias", torch.zeros(3))
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.power + self.bias, targets)


Change = Callable[[int], object]


def in_place(tensor: Tensor, step: int) -> None:
    with torch.no_grad():
        tensor.mul_(1.0 + step)


def attribute(name: str) -> Callable[[], tuple[Any, Change]]:
    def make() -> tuple[Any, Change]:
        loss = Weighted()
        return loss, lambda step: setattr(loss, name, 1.0 + step)

    return make


def change_of(change: Callable[[Weighted, int], object]) -> Callable[[], tuple[Any, Change]]:
    def make() -> tuple[Any, Change]:
        loss = Weighted()
        return loss, partial(change, loss)

    return make


def label_smoothing() -> tuple[Any, Change]:
    loss = nn.CrossEntropyLoss()
    return loss, lambda step: setattr(loss, "label_smoothing", 0.1 * step)


def weight_replaced() -> tuple[Any, Change]:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    return loss, lambda step: setattr(loss, "weight", torch.tensor([1.0, 1.0 + step, 2.0]))


def weight_written() -> tuple[Any, Change]:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    return loss, lambda step: in_place(loss.weight[1:], step)


def function_attribute() -> tuple[Any, Change]:
    with_attribute.beta = 1.0  # type: ignore[attr-defined]
    return with_attribute, lambda step: setattr(with_attribute, "beta", 1.0 + step)


def default_argument() -> tuple[Any, Change]:
    defaults: Any = with_default.__defaults__
    defaults[0]["beta"] = 1.0
    return with_default, lambda step: defaults[0].update(beta=1.0 + step)


def default_replaced() -> tuple[Any, Change]:
    def change(step: int) -> None:
        with_default.__defaults__ = ({"beta": 1.0 + step},)
        with_default.__kwdefaults__ = {"power": 1.0 + step}

    change(0)
    return with_default, change


def of_a_function_that_is_called() -> tuple[Any, Change]:
    (_, first), (_, second) = function_attribute(), default_argument()
    return calls_another, lambda step: (first(step), second(step))


def partial_keywords() -> tuple[Any, Change]:
    cfg = {"beta": 1.0}
    loss = partial(with_default, cfg=cfg)
    return loss, lambda step: (cfg.update(beta=1.0 + step), loss.keywords.update(power=1.0 + step))


def bound_method() -> tuple[Any, Change]:
    loss = Weighted()
    return loss.__call__, lambda step: setattr(loss, "beta", 1.0 + step)


VARIANTS: dict[str, Callable[[], tuple[Any, Change]]] = {
    "an attribute": attribute("beta"),
    "a tensor written in place": change_of(lambda loss, step: in_place(loss.tensor, step)),
    "a tensor written through data": change_of(lambda loss, step: loss.tensor.data.fill_(step)),
    "a large tensor": change_of(lambda loss, step: in_place(loss.large[-1:], step)),
    "a large tensor replaced": change_of(
        lambda loss, step: setattr(loss, "large", torch.full((30_000 + step,), 1.0 + step))
    ),
    "an array": change_of(lambda loss, step: loss.array.__setitem__(1, 1.0 + step)),
    "a list": change_of(lambda loss, step: loss.list.__setitem__(0, 1.0 + step)),
    "a dict": change_of(lambda loss, step: loss.dict.update(beta=1.0 + step)),
    "an object with slots": change_of(lambda loss, step: setattr(loss.slotted, "beta", 1.0 + step)),
    "other functions": change_of(
        lambda loss, step: loss.terms.__setitem__(0, (gained, squared)[step % 2])
    ),
    "label smoothing": label_smoothing,
    "class weights replaced": weight_replaced,
    "class weights written": weight_written,
    "an attribute of a function": function_attribute,
    "a default argument": default_argument,
    "other default arguments": default_replaced,
    "what a called function keeps": of_a_function_that_is_called,
    "keywords of a partial": partial_keywords,
    "a bound method": bound_method,
}
TWO_WORKERS = {"an attribute", "a large tensor replaced", "class weights written"}
FORMATIONS = [
    pytest.param(name, 1 + (name in TWO_WORKERS), id=name.replace(" ", "_")) for name in VARIANTS
]


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    drawn = partial(torch.randint, 3, (8,), generator=generator)
    return [(torch.randn(8, 6, generator=generator), drawn()) for _ in range(4)]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def open_trainer(net: nn.Module, loss: Any, executor: str, workers: int, **kw: Any) -> Any:
    replicas = workers if executor == "processes" else 2
    return phalanx.Trainer(
        net, loss, sgd, executor=executor, replicas=replicas, microbatches=2, **kw
    )


def weights_of(net: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def train(
    net: nn.Module,
    loss: Any,
    change: Change,
    executor: str,
    workers: int = 1,
    kill: bool = False,
    **options: Any,
) -> Tensor:
    with open_trainer(net, loss, executor, workers, **options) as trainer:
        for step, batch in enumerate(batches()):
            change(step)
            trainer.step(batch)
            if kill and step == 1 and executor == "processes":
                os.kill(trainer.worker_pids[0], signal.SIGKILL)
    return weights_of(net)


@pytest.mark.parametrize(("name", "workers"), FORMATIONS)
def test_what_changes_in_a_loss_changes_in_worker_processes(name: str, workers: int) -> None:
    threads, processes, unchanged = (
        train(linear(), loss, change if moves else bool, executor, workers)
        for executor, moves in (("threads", True), ("processes", True), ("threads", False))
        for loss, change in [VARIANTS[name]()]
    )
    assert torch.equal(threads, processes)
    assert not torch.equal(threads, unchanged)


@pytest.mark.parametrize(("through_data", "kill"), [(False, True), (True, False)])
def test_a_moving_average_teaches_in_worker_processes(through_data: bool, kill: bool) -> None:
    def run(executor: str) -> Tensor:
        net = linear()
        forward = Taught(copy.deepcopy(net).requires_grad_(False))

        def change(step: int) -> None:
            for own, theirs in zip(forward.teacher.parameters(), net.parameters(), strict=True):
                (own.data if through_data else own).lerp_(theirs.detach(), 0.5)

        return train(net, None, change, executor, 2, kill, forward=forward)

    assert torch.equal(run("threads"), run("processes"))


def test_a_loss_of_the_module_itself_trains_the_modules_parameters() -> None:
    def run(executor: str) -> Tensor:
        torch.manual_seed(0)
        net = Criterion()

        def change(step: int) -> None:
            net.beta = float(step)  # what belongs to the module goes its own way
            in_place(net.bias, step)
            in_place(net.power, step)

        found = train(net, net.loss, change, executor, 2)
        assert not torch.equal(net.power, torch.ones(3))
        return found

    assert torch.equal(run("threads"), run("processes"))
