"""Replicas work on the caller's streams, in order with it and with other callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

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
