"""Ranks whose replicas are on accelerators, over groups that serve the CPU only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.nn import functional as F

import phalanx
from tests.device import accelerator
from tests.device.test_replicas import OPTIMIZERS, STEPS, Net, batch, equals_plain
from tests.multiprocess.ranks import Ranks

SGD = OPTIMIZERS["SGD-fused"]


@pytest.fixture(scope="module", params=["gloo", "phalanx"])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(2, backend=request.param) as ranks:
        yield ranks


def trained(rank: int, homes: list[str], executor: Any) -> tuple[str, Any]:
    """Train with the replicas of each rank on another device; return an error, or the weights."""
    accelerator.register()
    net = Net().to(homes[rank])
    options = {"executor": executor, "replicas": [f"dev:{rank}"]}
    try:
        with phalanx.Trainer(net, F.mse_loss, SGD, **{"microbatches": None, **options}) as trainer:
            for step in range(STEPS):
                trainer.step(batch(step, "cpu"))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", net.state_dict()


def test_ranks_that_hold_the_module_on_different_devices_hear_of_it(two: Ranks) -> None:
    for name, told in two.run(trained, ["cpu", "dev:1"], "ranks"):
        assert name == "ConfigError"
        assert "rank 1 differs from rank 0 in device types" in told


def test_replicas_on_accelerators_train_a_module_on_the_cpu(two: Ranks) -> None:
    for name, weights in two.run(trained, ["cpu", "cpu"], "ranks"):
        assert name == ""
        net = Net()
        net.load_state_dict(weights)
        assert equals_plain(net, SGD)
