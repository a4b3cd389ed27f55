"""The trainer steps the user's optimizer: what is done to it counts as it does in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import phalanx

pytestmark = pytest.mark.promise("users-optimizer")

FORMATIONS: tuple[dict[str, Any], ...] = (
    {"replicas": 1},
    {"replicas": 1, "microbatches": 2},
    {"replicas": 2},
)
PROCESSES: dict[str, Any] = {"replicas": 1, "executor": "processes"}
TWO_PROCESSES = pytest.param({**PROCESSES, "replicas": 2}, marks=pytest.mark.night)
formations = pytest.mark.parametrize("how", FORMATIONS, ids=str)
all_formations = pytest.mark.parametrize("how", [*FORMATIONS, PROCESSES, TWO_PROCESSES], ids=str)


def batches(num: int = 6) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 5, generator=draw), torch.randn(12, 3, generator=draw)) for _ in range(num)
    ]


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def data(num: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y.double()) for x, y in batches(num)]


def plain(make: Callable[..., Optimizer], between: Callable[[Optimizer, int], None]) -> nn.Linear:
    net = model()
    optimizer = make(list(net.parameters()))
    for index, (x, y) in enumerate(data()):
        between(optimizer, index)
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    return net


def trained(
    make: Callable[..., Optimizer], between: Callable[[Optimizer, int], None], **how: Any
) -> nn.Linear:
    net = model()
    with phalanx.Trainer(net, F.mse_loss, make, **{"microbatches": None, **how}) as trainer:
        for index, batch in enumerate(data()):
            between(trainer.optimizer, index)
            trainer.step(batch)
    return net


def nothing(optimizer: Optimizer, index: int) -> None:
    pass


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def assert_alike(net: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


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


@formations
def test_a_step_replaced_on_the_optimizer_is_called(how: dict[str, Any]) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return centralize(SGD(parameters, lr=0.1))

    assert_alike(trained(make, nothing, **how), plain(make, nothing))


@pytest.mark.parametrize("how", [FORMATIONS[-1], PROCESSES], ids=str)
def test_a_step_replaced_after_some_steps_is_called_from_then_on(how: dict[str, Any]) -> None:
    def between(optimizer: Optimizer, index: int) -> None:
        if index == 3:
            centralize(optimizer)

    assert_alike(trained(adamw, between, **how), plain(adamw, between))


# -- hooks --------------------------------------------------------------


@pytest.fixture(params=[register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def hooked(request: pytest.FixtureRequest) -> Iterator[list[Optimizer]]:
    seen: list[Optimizer] = []
    handle = request.param(lambda optimizer, *_: seen.append(optimizer))
    yield seen
    handle.remove()


@all_formations
def test_a_hook_on_all_optimizers_runs_once_a_step_with_the_users(
    how: dict[str, Any], hooked: list[Optimizer]
) -> None:
    with phalanx.Trainer(model(), F.mse_loss, adamw, **{"microbatches": None, **how}) as trainer:
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


@pytest.mark.parametrize("how", [FORMATIONS[-1], PROCESSES], ids=str)
@pytest.mark.parametrize("change", [emptied, zeroed, loaded])
def test_what_is_written_to_the_optimizers_state_counts(
    change: Callable[[Optimizer], None], how: dict[str, Any]
) -> None:
    def between(optimizer: Optimizer, index: int) -> None:
        if index == 3:
            change(optimizer)

    assert_alike(trained(adamw, between, **how), plain(adamw, between))


def test_what_is_kept_in_the_optimizers_state_for_each_parameter_stays_there() -> None:
    with phalanx.Trainer(model(), F.mse_loss, adamw, microbatches=None, replicas=2) as trainer:
        trainer.step(data()[0])
        parameters = trainer.optimizer.param_groups[0]["params"]
        for index, parameter in enumerate(parameters):
            trainer.optimizer.state[parameter]["mine"] = index
        trainer.fit(data())
        assert [trainer.optimizer.state[each]["mine"] for each in parameters] == [0, 1]
        state = trainer.optimizer.state_dict()
        trainer.optimizer.load_state_dict(copy.deepcopy(state))  # the trainer looks at it anew
        trainer.fit(data())
        assert [trainer.optimizer.state[each]["mine"] for each in parameters] == [0, 1]


# -- gradients ----------------------------------------------------------


@all_formations
def test_gradients_are_there_while_the_optimizer_steps_and_none_afterwards(
    how: dict[str, Any],
) -> None:
    seen: list[Tensor] = []

    def watched(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = SGD(parameters, lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.append(net.weight.grad.clone()))
        return optimizer

    net, twin = model(), model()
    with phalanx.Trainer(net, F.mse_loss, watched, **{"microbatches": None, **how}) as trainer:
        for x, y in data(3):
            net.bias.grad = torch.zeros(3, dtype=torch.float64)  # of the user's: not added to
            trainer.step((x, y))
            assert net.weight.grad is None
            assert net.bias.grad is None
            twin.zero_grad()
            F.mse_loss(twin(x), y).backward()
            torch.testing.assert_close(seen.pop(), twin.weight.grad)
