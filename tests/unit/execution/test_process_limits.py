"""A process executor where the system gives no more: memory, room in a folder, processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import OutOfSpace
from phalanx.ipc import Region
from tests.zoo import adamw, assert_same_bits

pytestmark = pytest.mark.promise("nothing-is-left-behind")

MOST_REFUSED = 100  # a first step asks for memory some ten times


def make(executor: str, optimizer: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2000, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    options: dict[str, Any] = {"replicas": 2, "executor": executor, "microbatches": 3}
    return phalanx.Trainer(net, nn.functional.mse_loss, optimizer, **options)


def make_batch() -> tuple[Tensor, Tensor]:
    """Rows that travel through shared memory."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(7, 2000, generator=draw), torch.randn(7, 3, generator=draw)


def everything(trainer: Any) -> list[Tensor]:
    states = trainer.optimizer.state_dict()["state"].values()
    moments = [value for state in states for value in state.values() if value is not None]
    return [each.detach().clone() for each in [*trainer.module.state_dict().values(), *moments]]


class Ration:
    """How many more times memory is given out, and how often it was."""

    left: float = math.inf
    given: int = 0


@pytest.fixture
def ration(monkeypatch: pytest.MonkeyPatch) -> Ration:
    ration = Ration()
    reserve = Region.reserve_part

    def give(self: Region, start: int, nbytes: int) -> None:
        if ration.left <= 0:
            raise OutOfSpace("There must be more bytes free.")
        ration.left -= 1
        ration.given += 1
        reserve(self, start, nbytes)

    monkeypatch.setattr(Region, "reserve_part", give)
    return ration


def test_memory_that_ends_anywhere_in_first_steps_refuses_them_whole(ration: Ration) -> None:
    batch = make_batch()
    with make("threads", adamw) as trainer:
        for _ in range(3):
            trainer.step(batch)
        expected = everything(trainer)
    with make("processes", adamw) as trainer:
        refused = [step_once(trainer, batch, ration) for _ in range(3)]
        assert refused[0] > 5  # parameters, gradients, a slot, the module; rows, more slots, state
        assert_same_bits(everything(trainer), expected)


def step_once(trainer: Any, batch: tuple[Tensor, Tensor], ration: Ration) -> int:
    """Return how often a step was refused, with less and less memory missing, until it was done."""
    before, done = everything(trainer), trainer.steps
    refused, allocations = 0, 0
    while trainer.steps == done:
        assert refused < MOST_REFUSED, "it asks for memory again and again"
        given = ration.given
        ration.left = allocations
        try:
            trainer.step(batch)
        except OutOfSpace:
            refused += 1
            assert trainer.steps == done
            assert_same_bits(everything(trainer), before)
            # An executor that was not opened gave its memory back; an open one keeps it.
            kept = trainer._engine.is_open and ration.given > given
            allocations = 0 if kept else allocations + 1
    ration.left = math.inf
    return refused
