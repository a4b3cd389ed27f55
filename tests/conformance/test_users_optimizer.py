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
from phalanx.execution.elementwise import steps_as_torch_does

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


@pytest.mark.parametrize("how", [*FORMATIONS, PROCESSES], ids=str)
def test_a_step_replaced_after_some_steps_is_called_from_then_on(how: dict[str, Any]) -> None:
    def between(optimizer: Optimizer, index: int) -> None:
        if index == 3:
            centralize(optimizer)

    assert_alike(trained(adamw, between, **how), plain(adamw, between))


def test_a_step_replaced_on_the_class_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD(model().parameters(), lr=0.1)
    inner = SGD.step
    monkeypatch.setattr(SGD, "step", lambda self, closure=None: inner(self, closure))
    assert not steps_as_torch_does(optimizer)


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


def replaced(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def zeroed(state: dict[str, Any]) -> None:
    state["exp_avg"].zero_()


def cleared(state: dict[str, Any]) -> None:
    state.clear()


def counted_anew(state: dict[str, Any]) -> None:
    state["step"].zero_()


def replaced_count(state: dict[str, Any]) -> None:
    state["step"] = torch.tensor(0.0)


def moved(state: dict[str, Any]) -> None:
    state["exp_avg"].data = torch.zeros_like(state["exp_avg"])


CHANGES = (replaced, zeroed, cleared, counted_anew, replaced_count, moved)


@formations
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("first", [True, False], ids=["one parameter", "all"])
def test_what_is_written_to_the_optimizers_state_counts(
    change: Callable[[dict[str, Any]], None], first: bool, how: dict[str, Any]
) -> None:
    check_change(change, first, how)


@pytest.mark.parametrize("how", [PROCESSES, TWO_PROCESSES], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        zeroed,
        counted_anew,
        *(pytest.param(each, marks=pytest.mark.night) for each in (replaced, cleared, moved)),
    ],
)
def test_what_is_written_to_it_counts_in_worker_processes(
    change: Callable[[dict[str, Any]], None], how: dict[str, Any]
) -> None:
    check_change(change, True, how)


def check_change(
    change: Callable[[dict[str, Any]], None], first: bool, how: dict[str, Any]
) -> None:
    def between(optimizer: Optimizer, index: int) -> None:
        if index == 3:
            parameters = optimizer.param_groups[0]["params"]
            for parameter in parameters[:1] if first else parameters:
                change(optimizer.state[parameter])

    assert_alike(trained(adamw, between, **how), plain(adamw, between))


@pytest.mark.parametrize("how", [*FORMATIONS, PROCESSES], ids=str)
def test_an_entry_of_the_optimizers_state_may_be_exchanged(how: dict[str, Any]) -> None:
    def between(optimizer: Optimizer, index: int) -> None:
        if index == 3:
            for parameter in optimizer.param_groups[0]["params"]:
                optimizer.state[parameter] = {}

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
def test_after_a_step_every_gradient_is_there(how: dict[str, Any]) -> None:
    net, twin = model(), model()
    with phalanx.Trainer(
        net, F.mse_loss, lambda ps: SGD(ps, lr=0.0), **{"microbatches": None, **how}
    ) as trainer:
        for x, y in data(3):
            trainer.optimizer.zero_grad()
            assert net.weight.grad is None
            trainer.step((x, y))
            twin.zero_grad()
            F.mse_loss(twin(x), y).backward()
            assert net.weight.grad is not None
            torch.testing.assert_close(net.weight.grad, twin.weight.grad)
            net.bias.grad = torch.zeros(3, dtype=torch.float64)  # of the user's: not written to
