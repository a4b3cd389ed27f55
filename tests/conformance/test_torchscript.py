"""A TorchScript module is refused by a sentence, whoever is to run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import UnsupportedError
from tests.zoo import simple_sgd as sgd

X = torch.randn(4, 5)
MAKERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: torch.jit.script(nn.Linear(5, 3)), "`module`"),
    "traced": (lambda: torch.jit.trace(nn.Linear(5, 3), X), "`module`"),
    "inside": (lambda: nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(5, 3))), "Module `1`"),
}
EVERY = pytest.mark.parametrize(("make", "name"), MAKERS.values(), ids=MAKERS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.promise("limits-say-so"),
]


def refused(name: str) -> Any:
    return pytest.raises(
        UnsupportedError,
        match=rf"{name} must be an ordinary module .* of TorchScript. Give the module that it was",
    )


@EVERY
@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_a_trainer_refuses_it(make: Callable[[], nn.Module], name: str, executor: str) -> None:
    with refused(name):
        phalanx.Trainer(
            make(), nn.functional.mse_loss, sgd, microbatches=None, replicas=1, executor=executor
        )


@EVERY
def test_a_container_refuses_it(make: Callable[[], nn.Module], name: str) -> None:
    with phalanx.DataParallel(make(), devices=2) as model, refused(name):
        model(X)
