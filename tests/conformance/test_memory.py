"""No entry point keeps a batch alive: its memory is freed with the last reference of the caller's.

The cyclic collector is off. Inputs, targets and what the model made of them are watched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import phalanx
from tests.zoo import plain_sgd

WIDTH, ROWS = 3, 7
CPUS = ["cpu", "cpu"]


@dataclass
class Batch:
    """Inputs and targets of the memory that is watched."""

    x: Tensor
    y: Tensor

    @classmethod
    def draw(cls) -> Batch:
        return cls(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1))

    def watched(self) -> list[StorageWeakRef]:
        return [StorageWeakRef(each.untyped_storage()) for each in (self.x, self.y)]


MADE: list[StorageWeakRef] = []


class Watched(nn.Linear):
    """Notes where its outputs lie."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        MADE.append(StorageWeakRef(made.untyped_storage()))
        return made


def linear() -> nn.Linear:
    return Watched(WIDTH, 1)


class Named(nn.Module):
    """Takes inputs in any form, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any, **others: Any) -> dict[str, Tensor]:
        x = x["deep"][0] if isinstance(x, dict) else x[0] if isinstance(x, (list, tuple)) else x
        return {"out": self.layer(x)}


Call = Callable[[Batch], object]
Made = Callable[[ExitStack], Call]


def called(make: Callable[[], nn.Module], of: Callable[[nn.Module, Batch], Any]) -> Made:
    """A module that is called, and whose outputs are gone back from."""

    def made(stack: ExitStack) -> Call:
        module = make()
        if hasattr(module, "close"):
            stack.callback(module.close)

        def call(batch: Batch) -> None:
            outputs = of(module, batch)
            outputs = outputs["out"] if isinstance(outputs, dict) else outputs
            outputs = outputs[0] if isinstance(outputs, list) else outputs
            outputs.sum().backward()

        return call

    return made


def replicated(of: Callable[[Any, Batch], Any], **options: Any) -> Made:
    return called(lambda: phalanx.DataParallel(Named(), CPUS, **options), of)


def keeps_last(call: Call) -> Call:
    """Let another batch follow: what was last stays, as its user may ask for it."""

    def twice(batch: Batch) -> None:
        call(batch)
        made = MADE.copy()
        call(Batch.draw())
        MADE[:] = made

    return twice


def trainer(executor: str) -> Made:
    """Let a trainer do all that it does with batches."""

    def made(stack: ExitStack) -> Call:
        training = stack.enter_context(
            phalanx.Trainer(
                linear(),
                F.mse_loss,
                plain_sgd,
                replicas=2 if executor == "threads" else 1,
                executor=executor,
            )
        )

        def call(batch: Batch) -> None:
            pair = batch.x, batch.y
            training.step(pair)
            training.fit([pair], steps=1)
            training.evaluate([pair])
            training.predict([batch.x])

        return keeps_last(call)

    return made


def raising(make: Made) -> Made:
    """What raises when it is called."""

    def made(stack: ExitStack) -> Call:
        inner = make(stack)

        def call(batch: Batch) -> None:
            try:
                inner(batch)
            except (ArithmeticError, phalanx.ConfigError, RuntimeError):
                return
            raise AssertionError("it must raise")

        return call

    return made


def fails(*_: Any) -> Any:
    raise ArithmeticError("as told")


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        return fails()


def failing_step(stack: ExitStack) -> Call:
    training = stack.enter_context(phalanx.Trainer(Failing(), F.mse_loss, plain_sgd, replicas=2))
    return lambda batch: training.step((batch.x, batch.y))


MAKERS: dict[str, Made] = {
    "tensor": replicated(lambda model, batch: model(batch.x)),
    "ModelParallel": called(
        lambda: phalanx.ModelParallel(1).add(linear(), "cpu").add(linear(), "cpu"),
        lambda model, batch: model(batch.x),
    ),
    **{f"Trainer, {kind}": trainer(kind) for kind in ("inline", "threads", "processes")},
    "an exception in forward": raising(
        called(lambda: phalanx.DataParallel(Failing(), CPUS), lambda model, batch: model(batch.x))
    ),
    "an exception in a step": raising(failing_step),
    "a refused batch": raising(
        replicated(lambda model, batch: model({"deep": [batch.x, batch.y[1:]]}))
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
    with ExitStack() as stack:
        call = MAKERS[name](stack)
        for _ in range(2):  # the first call does more than others
            batch = Batch.draw()
            watched = batch.watched()
            MADE.clear()
            call(batch)
            del batch
            assert all(each.expired() for each in watched + MADE)
