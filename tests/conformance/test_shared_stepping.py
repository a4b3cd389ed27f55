"""The optimizer's step in parts, of groups and dtypes of every kind, is that of one thread."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import phalanx
from tests.products import in_pairs

pytestmark = pytest.mark.promise("replicas-change-no-bit")


class Kinds(nn.Module):
    """Parameters of several dtypes, the complex one last."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(5, 1500)
        self.brief = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.out = nn.Linear(1500, 3)
        self.wave = nn.Parameter(torch.randn(3, 31, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.real(x)) * self.brief.float() + self.wave.abs().mean(1)
        return scores


def sgd_with_and_without_momentum(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD([{"params": parameters[:2], "momentum": 0.9}, {"params": parameters[2:]}], lr=0.001)


def adam_with_and_without_the_largest(parameters: list[nn.Parameter]) -> Optimizer:
    return Adam([{"params": parameters[:2]}, {"params": parameters[2:], "amsgrad": True}])


def train(
    executor: str,
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    between: Callable[[phalanx.Trainer], None] = lambda _: None,
) -> list[Tensor]:
    """Return weights and moments after three steps, ``between``, and three more."""
    torch.manual_seed(3)
    net = Kinds()
    batches = [(torch.randn(7, 5), torch.randn(7, 3)) for _ in range(3)]
    with phalanx.Trainer(
        net,
        nn.functional.mse_loss,
        optimizer,
        executor=executor,
        replicas=1 if executor == "inline" else 2,
        microbatches=3,
    ) as trainer:
        trainer.fit(batches)
        between(trainer)
        trainer.fit(batches)
    states = [trainer.optimizer.state[parameter] for parameter in net.parameters()]
    moments = [value for state in states for _, value in sorted(state.items())]
    return [each.detach().clone() for each in (*net.parameters(), *moments)]


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd_with_and_without_momentum,
        adam_with_and_without_the_largest,
        pytest.param(partial(AdamW, lr=0.01), marks=pytest.mark.night),
        pytest.param(partial(Adam, lr=0.01, foreach=True), marks=pytest.mark.night),
    ],
)
def test_groups_and_dtypes_of_several_kinds_are_stepped_as_in_one_thread(
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
) -> None:
    expected = train("inline", optimizer)
    found = train("processes", optimizer)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("executor", ["threads", "processes"])
@pytest.mark.parametrize("group", [0, 1])
def test_momentum_may_begin_later_and_belongs_to_the_optimizer_of_this_process(
    executor: str, group: int
) -> None:
    def without_momentum(parameters: list[nn.Parameter]) -> Optimizer:
        # The second group lies in the last part of the memory only.
        return SGD([{"params": parameters[:4]}, {"params": parameters[4:]}], lr=0.001)

    def let_it_begin_and_lose_a_worker(trainer: phalanx.Trainer) -> None:
        trainer.optimizer.param_groups[group]["momentum"] = 0.9
        trainer.fit([(torch.ones(7, 5), torch.ones(7, 3))] * 2)
        for pid in trainer.worker_pids:
            os.kill(pid, signal.SIGKILL)

    expected = train("inline", without_momentum, let_it_begin_and_lose_a_worker)
    found = train(executor, without_momentum, let_it_begin_and_lose_a_worker)
    assert len(found) == len(expected) > len(list(Kinds().parameters()))
    assert all(map(torch.equal, found, expected))


@in_pairs(
    "executor, momentum, dtype",
    ["inline", "threads", "processes"],
    [0.0, 0.9],
    [torch.bfloat16, torch.float16],
)
def test_sgd_of_short_floats_steps_as_plain_torch(
    executor: str, momentum: float, dtype: torch.dtype
) -> None:
    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.01, momentum=momentum)

    torch.manual_seed(5)
    # Whole vectors: `add_(…, alpha=)` of short floats rounds once more in what a tensor has beyond.
    net = nn.Linear(32, 64, dtype=dtype)
    plain = copy.deepcopy(net)
    batches = [(torch.randn(6, 32, dtype=dtype), torch.randn(6, 64, dtype=dtype))] * 3
    own = optimizer(list(plain.parameters()))
    for x, y in batches:
        own.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        own.step()
    with phalanx.Trainer(
        net, nn.functional.mse_loss, optimizer, executor=executor, replicas=1, microbatches=1
    ) as trainer:
        trainer.fit(batches)
    assert torch.equal(net.weight, plain.weight)
    assert torch.equal(net.bias, plain.bias)
