"""Inputs and targets that a forward pass or a loss changes in place stay the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.worlds import EXECUTORS
from tests.zoo import simple_sgd as sgd

pytestmark = pytest.mark.promise("state-is-shared")

mse = nn.functional.mse_loss


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(12, 9, generator=draw), torch.randn(12, 4, generator=draw)


def trainer(net: nn.Module, executor: str, replicas: Any, loss: Callable[..., Any] = mse) -> Any:
    options: dict[str, Any] = {"executor": executor, "replicas": replicas, "microbatches": 4}
    return phalanx.Trainer(net, loss, sgd, **{"microbatches": None, **options})


class InPlace(nn.Module):
    """It changes its input, and its loss the targets, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sub_(1.0).mul_(0.5))


def halving(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse(outputs, targets.mul_(0.5))


def test_inputs_that_are_changed_in_place_stay_the_users_in_every_executor() -> None:
    """Over epochs of one list, every executor computes what plain torch does on fresh copies."""
    torch.manual_seed(0)
    start = InPlace().state_dict()
    x, y = batch()
    found = []
    for executor, replicas in EXECUTORS:
        net = InPlace()
        net.load_state_dict(start)
        given = [(x.clone(), y.clone())]
        with trainer(net, executor, replicas, halving) as t:
            t.fit(given, epochs=3)
            t.evaluate(given)
        assert torch.equal(given[0][0], x)
        assert torch.equal(given[0][1], y)
        found.append(net.state_dict())
    plain = InPlace()
    plain.load_state_dict(start)
    optimizer = sgd(list(plain.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        halving(plain(x.clone()), y.clone()).backward()
        optimizer.step()
    torch.testing.assert_close(found[0], plain.state_dict())
    for state in found[1:]:
        torch.testing.assert_close(state, found[0], rtol=0.0, atol=0.0)
