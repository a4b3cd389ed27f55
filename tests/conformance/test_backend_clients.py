"""Real clients of torch.distributed give over `phalanx` what they give over gloo, unmodified."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.contracts.collectives import group
from tests.multiprocess.ranks import Ranks

pytestmark = pytest.mark.promise("backend-carries-other-libraries")

Values = dict[str, list[float]]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.night), 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


BY_NIGHT = [
    pytest.param(hosts, marks=pytest.mark.night) for hosts in ("aab", "abaa", "aabb", "abc")
]


@pytest.fixture(scope="module", params=["aba", *BY_NIGHT])
def ranks_of_hosts(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(len(request.param), hosts=request.param) as ranks:
        yield ranks


class Net(nn.Module):
    """A branch that not every rank uses, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.twice = nn.Linear(12, 12)
        self.sometimes = nn.Linear(12, 12)
        self.last = nn.Linear(12, 6)

    def forward(self, inputs: Tensor, branch: bool = False) -> Tensor:
        hidden = torch.relu(self.twice(torch.tanh(self.twice(self.first(inputs)))))
        return self.last(self.sometimes(hidden) if branch else hidden)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def draw(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def values_of(module: nn.Module) -> Values:
    found = {}
    for name, parameter in module.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("module.")] = whole.detach().flatten().tolist()
    return found


def train(model: nn.Module, optimizer: Any, rank: int, **options: Any) -> Values:
    for step in range(3):
        optimizer.zero_grad()
        model(draw(rank, step), **options).square().mean().backward()
        optimizer.step()
    return values_of(model)


def ddp(rank: int, backend: str, **options: Any) -> tuple[DistributedDataParallel, Any]:
    wrapped = DistributedDataParallel(
        make_net(), process_group=group(backend), bucket_cap_mb=1e-3, **options
    )
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)


def with_unused_parameters(rank: int, backend: str) -> Values:
    model, optimizer = ddp(rank, backend, find_unused_parameters=True)
    return train(model, optimizer, rank, branch=rank == 0)


def with_a_static_graph(rank: int, backend: str) -> Values:
    model, optimizer = ddp(rank, backend, static_graph=True)
    return train(model, optimizer, rank, branch=True)


def with_a_compressing_hook(rank: int, backend: str) -> Values:
    model, optimizer = ddp(rank, backend, find_unused_parameters=True)
    model.register_comm_hook(group(backend), default_hooks.fp16_compress_hook)
    return train(model, optimizer, rank)


def without_sync_for_a_while(rank: int, backend: str) -> Values:
    model, optimizer = ddp(rank, backend, find_unused_parameters=True)
    for step in range(4):
        with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            model(draw(rank, step)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return values_of(model)


def with_unequal_numbers_of_batches(rank: int, backend: str) -> Values:
    model, optimizer = ddp(rank, backend)
    with Join([model]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(draw(rank, step), branch=True).square().mean().backward()
            optimizer.step()
    dist.barrier(group=group(backend))
    return values_of(model)


def with_a_sharded_optimizer(rank: int, backend: str) -> Values:
    wrapped, _ = ddp(rank, backend, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.Adam, process_group=group(backend), lr=0.01
    )
    return train(wrapped, optimizer, rank)


def fully_sharded(rank: int, backend: str) -> Values:
    model = make_net()
    mesh = DeviceMesh.from_group(group(backend), "cpu")
    for layer in (model.first, model.twice, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, branch=True)


def tensor_parallel(rank: int, backend: str) -> Values:
    mesh = DeviceMesh.from_group(group(backend), "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


def redistributed(rank: int, backend: str) -> Values:
    mesh = DeviceMesh.from_group(group(backend), "cpu")
    whole = torch.arange(35, dtype=torch.float64).view(5, 7)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows.t() @ rows
    return {
        "local": columns.to_local().flatten().tolist(),
        "whole": columns.full_tensor().flatten().tolist(),
        "product": product.full_tensor().flatten().tolist(),
    }


def with_objects(rank: int, backend: str) -> Values:
    size = dist.get_world_size()
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank}, group=group(backend))
    words = ["from 0"] if rank == 0 else [None]
    dist.broadcast_object_list(words, 0, group=group(backend))
    own: list[Any] = [None]
    dist.scatter_object_list(own, list(range(size)) if rank == 0 else None, 0, group=group(backend))
    assert (everything, words) == ([{"rank": r} for r in range(size)], ["from 0"])
    return {"own": own}


CLIENTS: dict[str, Callable[[int, str], Values]] = {
    "DDP with unused parameters": with_unused_parameters,
    "DDP with a static graph": with_a_static_graph,
    "DDP with a hook": with_a_compressing_hook,
    "DDP without sync": without_sync_for_a_while,
    "Join": with_unequal_numbers_of_batches,
    "ZeroRedundancyOptimizer": with_a_sharded_optimizer,
    "FSDP2": fully_sharded,
    "tensor parallelism": tensor_parallel,
    "DTensor": redistributed,
    "objects": with_objects,
}


def over_both(rank: int, name: str) -> tuple[Values, Values]:
    return CLIENTS[name](rank, "phalanx"), CLIENTS[name](rank, "gloo")


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_gives_what_it_gives_over_gloo(ranks, name):
    answers = ranks.run(over_both, name)
    for ours, gloos in answers:
        assert ours.keys() == gloos.keys()
        for key, numbers in ours.items():
            # float64; gloo adds in another order. A float16 hook rounds each sum otherwise.
            rel = 2e-2 if "hook" in name else 1e-12
            assert numbers == pytest.approx(gloos[key], rel=rel, abs=rel), key
    if "DDP" in name:
        assert all(ours == answers[0][0] for ours, _ in answers)  # the same bits


@pytest.mark.parametrize(
    "name", ["DDP with unused parameters", "DDP without sync", "FSDP2", "objects"]
)
def test_a_client_on_several_hosts_gives_what_it_gives_over_gloo(ranks_of_hosts, name):
    for ours, gloos in ranks_of_hosts.run(over_both, name):
        for key, numbers in ours.items():
            assert numbers == pytest.approx(gloos[key], rel=1e-12, abs=1e-12), key


def saved_and_loaded(rank: int, folder: str) -> bool:
    """As the only group of the job: distributed checkpoints work over the default group."""
    model = make_net()
    fully_shard(model, mesh=DeviceMesh.from_group(group("phalanx"), "cpu"))
    state = model.state_dict()
    expected = copy.deepcopy(values_of(model))
    checkpoint.save(state, checkpoint_id=folder, process_group=group("phalanx"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.load(state, checkpoint_id=folder, process_group=group("phalanx"))
    model.load_state_dict(state)
    return values_of(model) == expected


def test_a_distributed_checkpoint_is_saved_and_loaded(ranks, tmp_path: Path):
    assert all(ranks.run(saved_and_loaded, str(tmp_path)))
