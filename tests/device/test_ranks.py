"""Ranks whose replicas are on accelerators, over groups that serve the CPU only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional as F

import phalanx
from phalanx.distributed.open_store import FOLDER
from tests.device import accelerator
from tests.device.test_replicas import OPTIMIZERS, STEPS, Net, batch, equals_plain
from tests.multiprocess.ranks import Ranks

SGD = OPTIMIZERS["SGD-fused"]
SERVED = {"gloo": "cpu, cuda", "phalanx": "cpu"}


@pytest.fixture(scope="module", params=SERVED)
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


def test_a_module_where_the_group_cannot_reach_is_refused_before_the_first_step(
    two: Ranks,
) -> None:
    for name, told in two.run(trained, ["dev:0", "dev:0"], "ranks"):
        assert name == "ConfigError"
        assert f"can exchange ({SERVED[two.backend]}), but is on dev." in told
        assert "`replicas=['dev:0']`" in told


def test_ranks_that_hold_the_module_on_different_devices_hear_of_it(two: Ranks) -> None:
    for name, told in two.run(trained, ["cpu", "dev:1"], "ranks"):
        assert name == "ConfigError"
        assert "rank 1 differs from rank 0 in device types (dev, not cpu)" in told


def test_replicas_on_accelerators_train_a_module_on_the_cpu(two: Ranks) -> None:
    for name, weights in two.run(trained, ["cpu", "cpu"], "ranks"):
        assert name == ""
        net = Net()
        net.load_state_dict(weights)
        assert equals_plain(net, SGD)


def test_ranks_that_survive_are_refused_there_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", FOLDER: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    name, told = trained(0, ["dev:0"], phalanx.Ranks())
    assert name == "ConfigError"
    assert "can exchange (cpu), but is on dev." in told
