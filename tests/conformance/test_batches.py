"""Batches of many forms are computed as plain PyTorch computes them, or refused."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.regression import MeanSquaredError

import phalanx
from tests.zoo import simple_sgd as sgd

pytestmark = pytest.mark.promise("batches-of-any-structure")

MSE = nn.functional.mse_loss
ROWS = 7


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 3, generator=generator)


class Text(nn.Module):
    """One word per row: a row that met another's word would give another output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.last = nn.Embedding(10, 6), nn.Linear(10, 3)

    def forward(self, x: Tensor, words: Any) -> Tensor:
        pairs = zip(x, words, strict=False)
        rows = [torch.cat([row, self.embed.weight[len(word)]]) for row, word in pairs]
        return self.last(torch.stack(rows))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, w: Any) -> Tensor:
        return self.last(x) * torch.as_tensor(w, dtype=x.dtype)[:, None]


class Batch(dict[str, Any]):
    """As EasyDict and its like."""


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor


WORDS = ["w" * (1 + place) for place in range(ROWS)]
# The model, its inputs, and the path of a list among them.
CASES = {
    "list of strings": (Text, lambda x: (x, WORDS), "1"),
    "tuple of strings": (Text, lambda x: (x, tuple(WORDS)), "1"),
    "list of dicts": (Text, lambda x: (x, [dict.fromkeys(range(k), 0) for k in range(ROWS)]), "1"),
    "array": (Weighted, lambda x: (x, np.linspace(0.1, 1.0, ROWS)), None),
    "subclass of dict": (Weighted, lambda x: Batch(x=x, w=torch.ones(ROWS)), None),
    "user dict": (Weighted, lambda x: UserDict(x=x, w=[0.5] * ROWS), "w"),
}


def plain(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if hasattr(inputs, "keys") else module(*inputs)


@pytest.mark.parametrize("options", [{"replicas": 1, "microbatches": 3}, {"replicas": 2}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_splits_every_form_of_inputs(case: str, options: dict[str, Any]) -> None:
    check_trainer(case, options)


@pytest.mark.parametrize("case", ["list of dicts", "user dict"])
def test_worker_processes_are_sent_every_form_of_inputs(case: str) -> None:
    check_trainer(case, {"replicas": 1, "microbatches": 3, "executor": "processes"})


def check_trainer(case: str, options: dict[str, Any]) -> None:
    kind, make, path = CASES[case]
    (x, y), net = data(), kind()
    inputs, twin = make(x), copy.deepcopy(net)
    optimizer = sgd(twin.parameters())
    layout = phalanx.Layout(dims={f"0.{path}": 0} if path else {})
    options = {"microbatches": None, "layout": layout, **options}
    with phalanx.Trainer(net, MSE, sgd, **options) as trainer:
        for _ in range(3):
            optimizer.zero_grad()
            loss = MSE(plain(twin, inputs), y)
            loss.backward()
            optimizer.step()
            assert trainer.step((inputs, y)).loss == pytest.approx(loss.item(), rel=1e-5)
    for own, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("case", CASES)
def test_a_container_splits_every_form_of_inputs(case: str) -> None:
    kind, make, path = CASES[case]
    net, inputs = kind(), make(data()[0])
    layout = phalanx.Layout(dims={path: 0} if path else {})
    with phalanx.DataParallel(net, devices=3, layout=layout) as model:
        torch.testing.assert_close(plain(model, inputs), plain(net, inputs))


def forward(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
    outputs = module(x)
    return MSE(outputs, y), outputs, y


@pytest.mark.parametrize(
    ("kind", "executor"),
    [(dict, "threads"), (UserDict, "threads"), (Pair, "threads"), (Pair, "processes")],
)
def test_metrics_of_a_batch_that_is_no_pair_see_the_targets_that_forward_returns(
    kind: Any, executor: str
) -> None:
    (x, y), net = data(), nn.Linear(4, 3)
    metrics = {"mse": MeanSquaredError()}
    with phalanx.Trainer(
        net,
        None,
        sgd,
        forward=forward,
        replicas=1 if executor == "processes" else 2,
        microbatches=3,
        metrics=metrics,
        executor=executor,
    ) as trainer:
        done = trainer.fit([kind(x=x, y=y)])[0]
        assert done.train["mse"] == pytest.approx(done.train["loss"], rel=1e-5)
        found = trainer.evaluate([kind(x=x, y=y)])
    assert found["mse"] == pytest.approx(MSE(net(x), y).item(), rel=1e-5)


def take_apart(batch: Any) -> list[Any]:
    images, targets = batch
    return list(zip(images, targets, strict=True))


def put_together(samples: list[Any]) -> Any:
    return tuple(map(list, zip(*samples, strict=True)))


def detection(module: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    losses = [
        MSE(module(image), target["boxes"].mean(0))
        for image, target in zip(images, targets, strict=True)
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("microbatches", [None, 3])
def test_a_batch_of_samples_is_split_by_the_users_functions(microbatches: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    images = [torch.randn(4, generator=generator) for _ in range(5)]
    targets = [{"boxes": torch.randn(1 + k, 3, generator=generator)} for k in range(5)]
    net = nn.Linear(4, 3)
    layout = phalanx.Layout(split=take_apart, collate=put_together)
    expected = detection(net, (images, targets)).item()
    with phalanx.Trainer(
        net, None, sgd, forward=detection, layout=layout, replicas=2, microbatches=microbatches
    ) as trainer:
        assert trainer.step((images, targets)).loss == pytest.approx(expected, rel=1e-5)
