"""One contract of executors: inline, threads, worker processes and ranks do the same."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.worlds import INLINE, World, in_executor_worlds
from tests.zoo import MLP, adamw, assert_same_bits, mlp, state_of, vector_batch

ROWS, MICROBATCHES, FAILING = 12, 6, 7.5


class Odd(ArithmeticError):
    """An error with an attribute of its own, which arrives."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Fails(torch.autograd.Function):
    """The identity, which raises on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Odd(5)


class Net(nn.Module):
    """Draws, has statistics and a counter, and fails for marked rows."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.where = where
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.5)
        self.body = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        marked = bool((x == FAILING).any())
        if marked and self.where == "forward":
            raise Odd(5)
        x = self.drop(self.norm(x))
        if marked and self.where == "backward":
            x = Fails.apply(x)
        return self.body(x)


class Loss(nn.Module):
    """Cross-entropy, which fails for the class 3 where it is told."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.where = where

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.where == "loss" and bool((targets == 3).all()):
            raise Odd(5)
        return MLP.loss(outputs, targets)


def make(executor: str, replicas: int, where: str = "") -> phalanx.Trainer:
    torch.manual_seed(3)
    return phalanx.Trainer(
        Net(where),
        Loss(where),
        adamw,
        executor=executor,
        replicas=replicas,
        microbatches=MICROBATCHES,
        seed=5,
    )


def everything(trainer: phalanx.Trainer) -> dict[str, Any]:
    optimizer = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value,
        trainer.optimizer.state_dict()["state"],
    )
    return {"optimizer": optimizer, **visible(trainer)}


def visible(trainer: phalanx.Trainer) -> dict[str, Any]:
    """Return what every rank has; of the optimizer's state each has a share."""
    return {"module": state_of(trainer.module), "steps": trainer.steps}


def same(left: Any, right: Any) -> bool:
    try:
        assert_same_bits(left, right)
    except AssertionError:
        return False
    return True


@dataclass
class Failure:
    """What a failing step showed, and what the trainer did afterwards."""

    kind: str
    row: int
    notes: str
    unchanged: bool
    after: dict[str, Any]


def fail(executor: str, replicas: int, *, where: str) -> Failure:
    good, bad = vector_batch(ROWS), vector_batch(ROWS, seed=1)
    bad[0][4:6] = FAILING  # microbatch 2
    bad[1][:] = 0
    bad[1][4:6] = 3
    with make(executor, replicas, where) as trainer:
        trainer.step(good)
        before = everything(trainer)
        try:
            trainer.step(bad)
        except ArithmeticError as error:
            found = error
        unchanged = same(before, everything(trainer))
        trainer.step(good)
        notes = "".join(traceback.format_exception(found))
        return Failure(type(found).__name__, found.row, notes, unchanged, everything(trainer))  # type: ignore[attr-defined]


@pytest.mark.promise("errors-arrive-as-raised", "refused-calls-change-nothing")
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
@in_executor_worlds
def test_an_error_arrives_as_it_was_raised_and_the_step_counts_for_nothing(
    world: World, n: int, where: str
) -> None:
    if world.name == "ranks":
        pytest.skip("the other ranks are told by a PeerError: test_rank_executor")
    (failure,) = world.run(partial(fail, where=where), n)
    assert (failure.kind, failure.row) == ("Odd", 5)
    assert "raise Odd(5)" in failure.notes  # in the traceback
    assert "aised by replica" in failure.notes
    assert "microbatch 2" in failure.notes
    assert failure.unchanged
    with make("inline", 1, where) as trainer:
        for _ in range(2):
            trainer.step(vector_batch(ROWS))
        assert_same_bits(failure.after, everything(trainer))


def draws() -> list[str]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return [repr(np.asarray(states[0]).tobytes()), repr(states[1]), repr(states[2])]


def draw(executor: str, replicas: int) -> tuple[bool, dict[str, Any]]:
    with make(executor, replicas) as trainer:
        torch.manual_seed(11)
        before = draws()
        trainer.step(vector_batch(ROWS))
        trainer.step(vector_batch(ROWS))
        return draws() == before, visible(trainer)


@pytest.mark.promise("random-numbers-repeat")
@in_executor_worlds
def test_a_step_draws_from_generators_of_its_own(world: World, n: int) -> None:
    (_, expected), *_ = INLINE.run(draw, 1)
    for untouched, found in world.run(draw, n):
        assert untouched
        assert_same_bits(found, expected)
