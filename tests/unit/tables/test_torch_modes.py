"""Tables where torch is in another mode than usual: a default device, inference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from phalanx import tables


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        # With the None that is left there, `torch.get_default_device()` fails in torch 2.8.
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


MODES = {
    "usual": contextlib.nullcontext,
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
}
CASES = [(made, used) for made in MODES for used in MODES if (made, used) != ("usual", "usual")]


def make(world: tables.TableGroup) -> list[tables.Table]:
    updaters = ("sum", "adam", {"name": "adagrad", "initial": 1.0})
    made = [
        world.matrix(5, 2, updater=updater, sync=sync, num_shards=num_shards, init=0.5)
        for updater in updaters
        for sync in (False, True)
        for num_shards in (1, 2)
    ]
    made += [
        world.keys(2, updater=updater, init=tables.Uniform(0, 1), capacity=16, sync=sync)
        for updater in updaters
        for sync in (False, True)
    ]
    return [
        *made,
        world.matrix(3, 2, "int64", init=[[1, 2]] * 3),
        world.array(2, init=np.ones(2, np.float32)),
    ]


def use(made: list[tables.Table]) -> list[torch.Tensor]:
    ones = torch.ones(3, 2, device="cpu")
    for table in made[:-2]:
        table.add([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], rows=[3, 3, 1])
        table.add(ones, rows=np.array([0, 4, 3]))
        if not isinstance(table, tables.KeyTable):
            table.add(np.ones((5, 2), np.float32))
        else:
            table.add(torch.ones(40, 2, device="cpu"), rows=range(40))
    made[-2].add([[1, 1]], rows=[2])
    made[-1].add([1.0, 1.0])
    return [table.get([3, 1, 0]) for table in made[:-2]] + [table.get() for table in made[-2:]]


@pytest.mark.parametrize(("made", "used"), CASES)
def test_tables_serve_in_every_mode_and_in_another_than_they_were_made_in(made, used):
    with tables.join(timeout_s=5) as world, tables.join(timeout_s=5) as twin:
        with MODES[made]():
            ours = make(world)
        with MODES[used]():
            found = use(ours)
        found += use(ours)
        theirs = make(twin)
        wanted = use(theirs) + use(theirs)
        for ours_, theirs_ in zip(found, wanted, strict=True):
            assert torch.equal(ours_, theirs_)


@pytest.mark.parametrize("mode", ["device", "inference"])
def test_modules_and_embeddings_are_shared_in_every_mode(mode):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    index = torch.tensor([1, 0, 1])
    with tables.join(timeout_s=5) as world:
        with MODES[mode]():
            shared = tables.SharedModule(net, world)
            shared.sync()
            table = world.matrix(2, 2, updater={"name": "sgd", "lr": 0.5})
            embedding = tables.TableEmbedding(table)
        shared.sync()
        with contextlib.nullcontext() if mode == "inference" else MODES[mode]():
            embedding(index).sum().backward()
        assert table.get().tolist() == [[-0.5, -0.5], [-1.0, -1.0]]
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_a_large_add_to_several_shards_in_inference_mode_does_not_hinder_the_next_one():
    delta, rows = torch.ones(5000, 64), torch.arange(5000) % 7
    with tables.join() as world:
        table = world.matrix(5000, 64, num_shards=3)
        with torch.inference_mode():
            table.add(delta, rows)
        table.add(delta, rows)
        assert table.get()[:7, 0].tolist() == (2 * rows.bincount()).tolist()
        assert not table.get()[7:].any()
