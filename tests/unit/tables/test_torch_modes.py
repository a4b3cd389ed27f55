"""What is shared where torch is in another mode than usual: a default device, inference."""

from __future__ import annotations

import contextlib

import pytest
import torch

from phalanx import tables

MODES = {"device": lambda: torch.device("meta"), "inference": torch.inference_mode}


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
