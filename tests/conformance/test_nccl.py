"""Sums by NCCL: refused where it cannot be, and plain PyTorch's numbers on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.errors import UnsupportedError
from tests.zoo import assert_close, sgd

TWO = ["cpu", "cpu"]


def container() -> None:
    phalanx.DataParallel(nn.Linear(3, 2), TWO, reduce="nccl")


def trainer() -> None:
    executor = phalanx.Threads(nccl=True)
    phalanx.Trainer(nn.Linear(3, 2), F.mse_loss, sgd, replicas=TWO, executor=executor)


def trainer_on_auto() -> None:
    phalanx.Trainer(nn.Linear(3, 2), F.mse_loss, sgd, executor=phalanx.Threads(nccl=True))


@pytest.mark.parametrize("make", [container, trainer, trainer_on_auto])
def test_devices_that_nccl_does_not_serve(make: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"Devices must be CUDA's for .* the devices are cpu"
    ):
        make()


@pytest.mark.gpu
def test_training_equals_plain_pytorch(gpu: torch.device) -> None:
    if gpu.type != "cuda":
        pytest.skip("needs NCCL")
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] * 2
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double().to(gpu)]
    nets += [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double().to(gpu)]
    nets[1].load_state_dict(nets[0].state_dict())
    x, y = (torch.randn(29, size, device=gpu, dtype=torch.float64) for size in (5, 3))
    plain = torch.optim.SGD(nets[1].parameters(), lr=0.1)
    with phalanx.DataParallel(nets[0], devices, reduce="nccl") as model:
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for net, each in ((model, stepper), (nets[1], plain)):
                each.zero_grad()
                F.mse_loss(net(x), y).backward()
                each.step()
    assert_close(list(nets[0].parameters()), list(nets[1].parameters()), torch.float64)
