"""Torch7's containers as scripts use and extend them: subclasses, columns, reset, saving."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.compat import torch7
from tests.contracts.containers import cpu_and_others
from tests.zoo import assert_close

pytestmark = pytest.mark.devices


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def two(container: Any) -> Any:
    column = mlp()
    first, other = cpu_and_others(2)
    return container.add(column, first).add(copy.deepcopy(column), other)


X = torch.linspace(-1, 1, 20).view(5, 4)


# --- rules of one's own ---------------------------------------------------------------------------


class Swapped(torch7.AbstractParallel):
    """Written as fbcunn's subclasses were: the old name of the rule."""

    def _distributeInput(self, input: Tensor) -> list[Tensor]:
        return list(input.chunk(2)[::-1])


def test_a_rule_of_ones_own_goes_by_its_old_name() -> None:
    with two(Swapped(0)) as net:
        own, plain = X.clone(), X.clone().requires_grad_()
        first, second = plain.chunk(2)
        expected = torch.cat([mlp()(second), mlp()(first)])
        output = net.forward(own)
        assert_close(output, expected.detach(), torch.float32)
        expected.sum().backward()
        assert_close(net.backward(own, torch.ones_like(output)), plain.grad, torch.float32)


# --- columns and devices --------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, -1, -2])
def test_every_column_of_replicas_is_the_module(index: int) -> None:
    for net in (
        two(torch7.DataParallel(0)),
        torch7.DataParallelTable(0).add(mlp(), cpu_and_others(2)),
    ):
        assert net.get(index) is net.module


# --- reset ----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inside = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * self.scale


class Redrawn(Scaled):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


def containers_of(module: nn.Module) -> list[Any]:
    return [
        torch7.DataParallelTable(0).add(module, cpu_and_others(2)).reset,
        torch7.ModelParallel(0).add(module, "cpu").reset,
    ]


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize("make", [Redrawn, lambda: nn.MultiheadAttention(4, 2), mlp])
def test_reset_reaches_every_parameter(make: Any, place: int) -> None:
    module = make()
    for parameter in module.parameters():
        nn.init.constant_(parameter, 7.0)
    containers_of(module)[place]()
    assert not any(bool((parameter == 7).any()) for parameter in module.parameters())


def test_reset_by_a_deviation_reaches_weights_of_ones_own() -> None:
    net = torch7.DataParallelTable(0).add(mlp(), cpu_and_others(2))
    net.module.register_parameter("extra", nn.Parameter(torch.full((5, 5), 7.0)))
    net.reset(0.5)
    assert float(net.module.extra.detach().abs().max()) <= 0.5 * 3**0.5


class Weighed(torch7.AbstractParallel):
    def __init__(self) -> None:
        super().__init__(0)
        self.gate = nn.Parameter(torch.full((2,), 7.0))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate)


def test_a_container_of_ones_own_draws_its_parameters_by_itself() -> None:
    net = Weighed().add(mlp(), "cpu")
    assert net.reset().gate.tolist() == [0.0, 0.0]


# --- saving ---------------------------------------------------------------------------------------


def saved_and_loaded(net: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("face", [phalanx.DataParallel, torch7.DataParallelTable])
def test_a_lambda_for_threads_does_not_prevent_saving(face: Any) -> None:
    ran: list[int] = []
    net = face(mlp(), 2) if face is phalanx.DataParallel else face(0).add(mlp(), cpu_and_others(2))
    net.threads(lambda: ran.append(1))
    with saved_and_loaded(net) as other:
        assert_close(other(X), mlp()(X), torch.float32)
    assert ran == []
