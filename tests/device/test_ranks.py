"""Ranks whose replicas are on accelerators, over groups that serve the CPU only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
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
        assert "rank 1 has other devices than rank 0" in told


def test_replicas_on_accelerators_train_a_module_on_the_cpu(two: Ranks) -> None:
    for name, weights in two.run(trained, ["cpu", "cpu"], "ranks"):
        assert name == ""
        net = Net()
        net.load_state_dict(weights)
        assert equals_plain(net, SGD)


def calls_of(rank: int, device: str) -> list[list[float]]:
    """Make calls with tensors on a device, contiguous and not; also without waiting."""
    accelerator.register()
    group = dist.new_group(backend="phalanx")

    def own(*shape: int) -> Tensor:
        return torch.full(shape, rank + 1.0, device=device)

    total, average, given, flat, part = own(5), own(4, 3).t(), own(3), own(4), own(2)
    works = [
        dist.all_reduce(total, group=group, async_op=True),
        dist.all_reduce(average, dist.ReduceOp.AVG, group=group, async_op=True),
    ]
    for work in works:
        work.wait()
    dist.broadcast(given, 1, group)
    dist.all_gather_into_tensor(flat, own(2), group)
    dist.reduce_scatter_tensor(part, flat, group=group)
    parts = [own(2), own(2)]
    dist.all_to_all(parts, [own(2), 5 * own(2)], group=group)
    if rank == 0:
        dist.send(total, 1, group)
    else:
        dist.recv(total, 0, group)
    found = [each.cpu().flatten().tolist() for each in (total, average, given, flat, part, *parts)]
    dist.destroy_process_group(group)
    return found


def test_the_backend_carries_tensors_on_devices(two: Ranks) -> None:
    assert two.run(calls_of, "dev:0") == two.run(calls_of, "cpu")
