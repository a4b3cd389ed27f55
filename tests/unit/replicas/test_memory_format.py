"""Convolution weights are laid out channels_last only where that is known to change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.replicas import use_channels_last, wants_channels_last
from phalanx.replicas.memory_format import KNOWN_KINDS
from tests.products import in_pairs

F64 = torch.float64

# What stands between two convolutions, or behind them.
BETWEEN: dict[type[nn.Module], Callable[[], nn.Module]] = {
    nn.AdaptiveAvgPool2d: lambda: nn.AdaptiveAvgPool2d(3),
    nn.AvgPool2d: lambda: nn.AvgPool2d(2),
    nn.BatchNorm2d: lambda: nn.BatchNorm2d(8),
    nn.Conv2d: lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2, padding_mode="circular"),
    nn.Dropout: lambda: nn.Dropout(0.0),
    nn.MaxPool2d: lambda: nn.MaxPool2d(2, stride=1),
    nn.Sequential: lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 1, stride=2, bias=False)),
    **{
        kind: kind
        for kind in (nn.ELU, nn.GELU, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.SiLU)
    },
    nn.Sigmoid: nn.Sigmoid,
    nn.Tanh: nn.Tanh,
    nn.Softmax: lambda: nn.Softmax(dim=1),
    nn.LogSoftmax: lambda: nn.LogSoftmax(dim=1),
}
BEHIND: dict[type[nn.Module], Callable[[], nn.Module]] = {
    nn.Flatten: nn.Flatten,
    nn.Linear: lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)),
    nn.BatchNorm1d: lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3), nn.Tanh()),
}


def convolutions(between: nn.Module, *behind: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
    return nn.Sequential(first, between, last, *behind)


def passed(module: nn.Module, x: torch.Tensor) -> list[Any]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.sin().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def test_every_known_kind_is_compared() -> None:
    assert set(BETWEEN) | set(BEHIND) == KNOWN_KINDS


@in_pairs("kind, rows, trains", [*BETWEEN, *BEHIND], [1, 2, 5], [True, False])
def test_a_known_kind_computes_the_same_in_both_layouts(
    kind: type[nn.Module], rows: int, trains: bool
) -> None:
    x = torch.randn(rows, 3, 6, 6, dtype=F64)
    if kind in BETWEEN:
        module = convolutions(BETWEEN[kind](), nn.Flatten()).double()
    elif kind is nn.BatchNorm1d:
        module = convolutions(nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(4 * 6 * 6)).double()
        trains = trains and rows > 1
    else:
        module = convolutions(nn.ReLU(), BEHIND[kind]()).double()
    module.train(trains)
    with torch.no_grad():
        module.eval()(x), module.train(trains)  # lazy layers get their shapes
    laid_out = copy.deepcopy(module)
    assert wants_channels_last(laid_out)
    use_channels_last(laid_out)
    for found, expected in zip(passed(laid_out, x), passed(module, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Own(nn.Sequential):
    """A user's class, whose forward may do anything."""


@pytest.mark.parametrize(
    "module",
    [
        convolutions(nn.InstanceNorm2d(8), nn.Flatten()),
        convolutions(Own(nn.ReLU()), nn.Flatten()),
        Own(nn.Conv2d(3, 4, 3), nn.Flatten()),
        convolutions(nn.ReLU()),  # its images leave it
        convolutions(nn.Flatten(), nn.Unflatten(1, (8, 6, 6))),
        nn.Sequential(nn.Flatten(), nn.Linear(3, 3)),
        convolutions(nn.ReLU(), nn.Flatten()).to("meta"),
    ],
)
def test_other_models_keep_their_layout(module: nn.Module) -> None:
    assert not wants_channels_last(module)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_instance_norm_has_the_right_gradients_by_default(rows: int, flat: bool) -> None:
    norm = nn.InstanceNorm2d(8, affine=True)
    net = convolutions(norm, *([nn.Flatten()] if flat else [])).double()
    x = torch.randn(rows, 3, 6, 6, dtype=F64)
    target = torch.randn_like(net(x))
    plain, wrapped = copy.deepcopy(net), copy.deepcopy(net)
    loss = nn.functional.mse_loss

    loss(plain(x), target).backward()

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    with phalanx.Trainer(net, loss, sgd, replicas=1, microbatches=min(4, rows)) as trainer:
        trainer.step((x, target))
        torch.testing.assert_close(gradients(net), gradients(plain), rtol=1e-9, atol=1e-9)
    with phalanx.DataParallel(wrapped, devices=["cpu", "cpu"]) as model:
        loss(model(x), target).backward()
    torch.testing.assert_close(gradients(wrapped), gradients(plain), rtol=1e-9, atol=1e-9)


def flattening() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))


def test_a_trainer_says_that_a_batch_runs_without_channels_last() -> None:
    net = flattening()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) + 0.1 * net[0].weight.view(-1).norm()

    batch = torch.ones(4, 3, 6, 6), torch.ones(4, 2)
    with phalanx.Trainer(
        net, loss, lambda own: torch.optim.SGD(own, lr=0.1), executor="inline", replicas=1
    ) as trainer:
        with pytest.warns(UserWarning, match="ran once more without .*view"):
            trainer.step(batch)
        trainer.step(batch)
    assert net[0].weight.is_contiguous()


def test_a_container_says_that_a_batch_runs_without_channels_last() -> None:
    net = flattening()

    def look(own: nn.Module, *_: object) -> None:
        own.weight.view(-1)

    net[0].register_forward_hook(look)
    with phalanx.DataParallel(net, ["cpu", "cpu"]) as model:
        with pytest.warns(UserWarning, match="ran once more without"):
            model(torch.ones(4, 3, 6, 6))
        model(torch.ones(4, 3, 6, 6))
