"""The trainer steps the user's optimizer: what is done to it counts as it does in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import phalanx
from tests.worlds import in_every_executor
from tests.zoo import MLP, assert_close, batches_of, mlp, state_of

pytestmark = pytest.mark.promise("users-optimizer")

F64 = torch.float64
Between = Callable[[Optimizer, int], None]


def data(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return batches_of(MLP, 12, F64, count)


def plain(make: Callable[..., Optimizer], between: Between) -> nn.Module:
    net = mlp(F64)
    optimizer = make(list(net.parameters()))
    for index, (inputs, targets) in enumerate(data()):
        between(optimizer, index)
        optimizer.zero_grad()
        MLP.loss(net(inputs), targets).backward()
        optimizer.step()
    return net


def trained(make: Any, between: Between, executor: str, replicas: int) -> nn.Module:
    with trainer_of(make, executor, replicas) as trainer:
        for index, batch in enumerate(data()):
            between(trainer.optimizer, index)
            trainer.step(batch)
        return trainer.module


def trainer_of(make: Any, executor: str, replicas: int, net: Any = None) -> phalanx.Trainer:
    net = mlp(F64) if net is None else net
    return phalanx.Trainer(net, MLP.loss, make, executor=executor, replicas=replicas)


def nothing(optimizer: Optimizer, index: int) -> None:
    pass


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def assert_alike(net: nn.Module, other: nn.Module) -> None:
    assert_close(state_of(net), state_of(other), F64)


# -- `step` replaced ----------------------------------------------------


def centralize(optimizer: Optimizer) -> Optimizer:
    """Take the mean out of every gradient before each step, as gradient centralization does."""
    inner = optimizer.step

    def step(closure: None = None) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.sub_(parameter.grad.mean())
        return inner(closure)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


@in_every_executor
def test_a_step_replaced_on_the_optimizer_is_called(executor: str, replicas: int) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return centralize(SGD(parameters, lr=0.1))

    assert_alike(trained(make, nothing, executor, replicas), plain(make, nothing))


# -- hooks --------------------------------------------------------------


@pytest.fixture(params=[register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def hooked(request: pytest.FixtureRequest) -> Iterator[list[Optimizer]]:
    seen: list[Optimizer] = []
    handle = request.param(lambda optimizer, *_: seen.append(optimizer))
    yield seen
    handle.remove()


@in_every_executor
def test_a_hook_on_all_optimizers_runs_once_a_step_with_the_users(
    executor: str, replicas: int, hooked: list[Optimizer]
) -> None:
    with trainer_of(adamw, executor, replicas) as trainer:
        trainer.fit(data())
        assert hooked == [trainer.optimizer] * 6


# -- state changed between steps ----------------------------------------


def emptied(optimizer: Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {}


def zeroed(optimizer: Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()


def loaded(optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"].mul_(2)
    optimizer.load_state_dict(state)


@in_every_executor
@pytest.mark.parametrize("change", [emptied, zeroed, loaded])
def test_what_is_written_to_the_optimizers_state_counts(
    change: Callable[[Optimizer], None], executor: str, replicas: int
) -> None:
    def between(optimizer: Optimizer, index: int) -> None:
        if index == 3:
            change(optimizer)

    assert_alike(trained(adamw, between, executor, replicas), plain(adamw, between))


# -- gradients ----------------------------------------------------------


@in_every_executor
def test_gradients_are_there_while_the_optimizer_steps_and_none_afterwards(
    executor: str, replicas: int
) -> None:
    seen: list[Tensor] = []

    def watched(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = SGD(parameters, lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.append(net[0].weight.grad.clone()))
        return optimizer

    net, twin = mlp(F64), mlp(F64)
    with trainer_of(watched, executor, replicas, net) as trainer:
        for x, y in data(3):
            net[0].bias.grad = torch.ones_like(net[0].bias)  # of the user's: not added to
            trainer.step((x, y))
            assert net[0].weight.grad is None
            assert net[0].bias.grad is None
            twin.zero_grad()
            MLP.loss(twin(x), y).backward()
            torch.testing.assert_close(seen.pop(), twin[0].weight.grad)
