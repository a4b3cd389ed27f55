"""No entry point keeps a batch alive: its memory is freed with the last reference of the caller's.

The cyclic collector is off. Inputs, targets and what the model made of them are watched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import phalanx
from tests.zoo import plain_sgd

WIDTH, ROWS = 3, 7
MADE: list[StorageWeakRef] = []
Pair = tuple[Tensor, Tensor]


def draw() -> Pair:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)


class Watched(nn.Linear):
    """Notes where its outputs lie."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        MADE.append(StorageWeakRef(made.untyped_storage()))
        return made


class Failing(Watched):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ArithmeticError("as told")


def in_container(model: Any, pair: Pair) -> None:
    model(pair[0]).sum().backward()


def in_trainer(trainer: phalanx.Trainer, pair: Pair) -> None:
    """Let a trainer do all that it does with batches."""
    use(trainer, pair)
    made = MADE.copy()
    use(trainer, draw())  # what was last stays, as its user may ask for it
    MADE[:] = made


def use(trainer: phalanx.Trainer, pair: Pair) -> None:
    trainer.step(pair)
    trainer.fit([pair], steps=1)
    trainer.evaluate([pair])
    trainer.predict([pair[0]])


def raising(call: Callable[[Any, Pair], object]) -> Callable[[Any, Pair], object]:
    def raised(model: Any, pair: Pair) -> None:
        with suppress(ArithmeticError, phalanx.ConfigError):
            call(model, pair)
            raise AssertionError("it must raise")

    return raised


def trainer_of(executor: str, module: type[nn.Module] = Watched) -> phalanx.Trainer:
    replicas = 2 if executor == "threads" else 1
    return phalanx.Trainer(module(), F.mse_loss, plain_sgd, replicas=replicas, executor=executor)


def replicated(module: type[nn.Module] = Watched) -> phalanx.DataParallel:
    return phalanx.DataParallel(module(), ["cpu", "cpu"])


MAKERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Pair], object]]] = {
    "DataParallel": (replicated, in_container),
    "ModelParallel": (
        lambda: phalanx.ModelParallel(1).add(Watched(), "cpu").add(Watched(), "cpu"),
        in_container,
    ),
    "Trainer, inline": (lambda: trainer_of("inline"), in_trainer),
    "Trainer, threads": (lambda: trainer_of("threads"), in_trainer),
    "Trainer, processes": (lambda: trainer_of("processes"), in_trainer),
    "an exception in forward": (lambda: replicated(Failing), raising(in_container)),
    "an exception in a step": (
        lambda: trainer_of("threads", Failing),
        raising(lambda trainer, pair: trainer.step(pair)),
    ),
    "a refused batch": (
        replicated,
        raising(lambda model, pair: model({"x": pair[0], "y": pair[1][1:]})),
    ),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_goes_with_its_last_reference(name: str, no_collector: None) -> None:
    make, call = MAKERS[name]
    with make() as model:
        for _ in range(2):  # the first call does more than others
            pair = draw()
            watched = [StorageWeakRef(each.untyped_storage()) for each in pair]
            MADE.clear()
            call(model, pair)
            del pair
            assert all(each.expired() for each in watched + MADE)
