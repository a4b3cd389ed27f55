"""Replicas work on the caller's streams, in order with it and with other callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from tests.device.test_replicas import (
    F64,
    OPTIMIZERS,
    Net,
    batch,
    by_container,
    by_trainer,
    equals_plain,
    on_side_streams,
)

SGD = OPTIMIZERS["SGD-fused"]


class Noting(nn.Module):
    """Notes the stream that it runs on."""

    seen: ClassVar[list[torch.Stream]] = []

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.accelerator.current_stream(x.device))
        return x * self.scale


@pytest.fixture
def noting() -> Iterator[Noting]:
    yield Noting().to("dev:0")
    Noting.seen.clear()


@pytest.mark.parametrize("device", ["dev:0", "dev:1"])
def test_replicas_run_on_the_callers_streams(noting: Noting, device: str) -> None:
    mine = torch.Stream(device)
    here = torch.dev.current_stream(device)
    with mine, phalanx.DataParallel(noting, [device, device]) as model:
        mine.wait_stream(torch.dev.default_stream("dev:0"))
        x = batch(0, "dev:0")[0]
        found = model(x)
        assert torch.dev.current_stream(device) == mine
    here.wait_stream(mine)
    assert found.tolist() == x.tolist()
    assert Noting.seen == [mine, mine]


@pytest.mark.parametrize("executor", ["threads", "inline"])
def test_a_replica_without_others_runs_on_the_callers_stream(noting: Noting, executor: str) -> None:
    stream = torch.Stream("dev:1")
    optimizer = partial(torch.optim.SGD, lr=0.0)
    x = batch(0, "dev:0")[0]
    with stream, torch.dev.device(0):
        stream.wait_stream(torch.dev.default_stream("dev:1"))
        with phalanx.Trainer(
            noting, F.mse_loss, optimizer, microbatches=None, replicas=["dev:1"], executor=executor
        ) as trainer:
            trainer.step((x, x))
        assert torch.dev.current_stream("dev:1") == stream
        assert torch.dev.current_device() == 0
    assert Noting.seen == [stream]


@pytest.mark.parametrize("way", [by_container, by_trainer])
def test_on_side_streams_of_the_caller(way: Callable[..., None]) -> None:
    net = Net().to("dev:0")
    on_side_streams(lambda: way(net, ["dev:0", "dev:1", "dev:0"], None, SGD))
    assert equals_plain(net, SGD)


# -- the sums --------------------------------------------------------


def test_all_that_a_trainer_does_on_side_streams() -> None:
    def everything(devices: list[str]) -> list[Any]:
        torch.manual_seed(0)
        layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        net = nn.Sequential(*layers).to(devices[0], F64)
        data = [batch(step, devices[0]) for step in range(4)]
        options: Any = {"microbatches": 3, "clip_norm": 0.1}
        options |= {"metrics": {"error": lambda out, y: (out - y).mean()}, "replicas": devices}
        with phalanx.Trainer(net, F.mse_loss, SGD, **{"microbatches": None, **options}) as trainer:
            (epoch,) = trainer.fit(data, progress=False)
            found = [*epoch.train.values(), *trainer.evaluate(data).values()]
            found.append(trainer.predict([each for each, _ in data]))
            return [*found, *net.state_dict().values()]

    found = on_side_streams(lambda: everything(["dev:0", "dev:1", "dev:0"]))
    for own, expected in zip(found, everything(["cpu"]), strict=True):
        torch.testing.assert_close(torch.as_tensor(own).cpu(), torch.as_tensor(expected))
