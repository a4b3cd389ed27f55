"""Replicas on another device have the parameters' present values, however these were written.

Fused optimizers, writes through `.data` and writes into a flat tensor raise no version counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.contracts.containers import draw, parallel
from tests.zoo import assert_close, plain_steps

pytestmark = pytest.mark.promise("state-is-shared")

F64 = torch.float64
Optimizer = torch.optim.Optimizer
STEPS = 8

FUSED: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(draw(6, 4, seed=seed), draw(6, 2, seed=seed)) for seed in range(STEPS)]


def in_container(module: nn.Module, factory: Callable[..., Optimizer]) -> None:
    with parallel(module) as model:
        plain_steps(model, nn.functional.mse_loss, factory, batches())


def in_trainer(module: nn.Module, factory: Callable[..., Optimizer]) -> None:
    with phalanx.Trainer(
        module, nn.functional.mse_loss, factory, microbatches=None, replicas=3
    ) as trainer:
        trainer.fit(batches())


@pytest.mark.parametrize(
    ("train", "factory"),
    [(in_container, FUSED["sgd"]), (in_trainer, FUSED["adam"])],
)
def test_after_a_fused_step(
    train: Callable[[nn.Module, Callable[..., Optimizer]], None],
    factory: Callable[..., Optimizer],
) -> None:
    module, twin = net(), net()
    train(module, factory)
    plain_steps(twin, nn.functional.mse_loss, factory, batches())
    assert_close(list(module.parameters()), list(twin.parameters()), F64, times=10)


class Flattening(nn.LSTM):
    """On the CPU, moves its weights when it is moved and when it is asked to, as CUDA's does."""

    def flatten_parameters(self) -> None:
        with torch.no_grad():
            for weight in self._flat_weights:
                weight.set_(weight.clone())


class Moving(nn.Linear):
    """Moves its weights when it is moved."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Moving:
        super()._apply(fn, recurse)
        self.weight.data = self.weight.data.clone()
        return self


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = Flattening(4, 3, batch_first=True), Moving(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()  # as many models do
        return self.head(self.lstm(x.unsqueeze(1))[0].squeeze(1))


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_weights_that_a_module_moves_are_still_those_that_are_trained(executor: str) -> None:
    module, plain = (Recurrent().double() for _ in range(2))
    loss = nn.functional.mse_loss
    plain_steps(plain, loss, FUSED["sgd"], batches())
    replicas = 1 if executor == "inline" else 2
    options = {"executor": executor, "replicas": replicas, "microbatches": 2}
    with phalanx.Trainer(
        module, loss, FUSED["sgd"], **{"microbatches": None, **options}
    ) as trainer:
        for batch in batches():
            trainer.step(batch)
    for own, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert_close(own, theirs, F64)
