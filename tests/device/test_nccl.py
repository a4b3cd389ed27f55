"""Gradients summed by NCCL within one process: its calls, with a stand-in that adds itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.execution import nccl_sums
from tests.device.test_replicas import F64, OPTIMIZERS, STEPS, Net, batch, equals_plain
from tests.zoo import assert_close

SGD = OPTIMIZERS["SGD-fused"]
Train = Callable[[nn.Module, Sequence[str]], None]


class StandIn:
    """Takes what `torch.cuda.nccl.reduce` takes, and adds in another order than ours."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []

    def reduce(self, inputs: list[Tensor], output: Tensor | None = None, root: int = 0) -> None:
        assert output is None
        assert len({(each.shape, each.dtype, each.is_contiguous()) for each in inputs}) == 1
        assert inputs[0].is_contiguous()
        assert inputs[0].is_floating_point()  # NCCL knows no complex numbers,
        assert len({each.device for each in inputs}) == len(inputs)  # nor the CPU, nor one twice
        assert all(each.device.type == "dev" for each in inputs)
        self.calls.append(([str(each.device) for each in inputs], root))
        for each in reversed(inputs):
            if each is not inputs[root]:
                inputs[root].add_(each.to(inputs[root].device))


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(torch.cuda.nccl, "reduce", found.reduce)
    monkeypatch.setattr(nccl_sums, "nccl_serves", lambda devices: True)
    return found


def by_container(net: nn.Module, devices: Sequence[str]) -> None:
    with phalanx.DataParallel(net, devices, reduce="nccl") as model:
        stepper = SGD(model.parameters())
        for step in range(STEPS):
            x, y = batch(step, "dev:0")
            stepper.zero_grad()
            F.mse_loss(model(x).to("dev:0"), y).backward()
            stepper.step()


def by_trainer(net: nn.Module, devices: Sequence[str]) -> None:
    with phalanx.Trainer(
        net,
        F.mse_loss,
        SGD,
        microbatches=None,
        replicas=devices,
        executor=phalanx.Threads(nccl=True),
    ) as trainer:
        for step in range(STEPS):
            trainer.step(batch(step, "dev:0"))


@pytest.mark.parametrize(
    ("devices", "summed"),
    [
        (["dev:0", "dev:1"], ["dev:0", "dev:1"]),
        (["dev:1", "dev:0", "dev:1"], ["dev:0", "dev:1"]),
        (["dev:1", "dev:1"], ["dev:0", "dev:1"]),  # no replica where the module is
        (["dev:0", "dev:0"], []),
    ],
)
@pytest.mark.parametrize("train", [by_container, by_trainer])
def test_one_call_a_step_with_the_modules_device_as_root(
    train: Train, devices: list[str], summed: list[str], nccl: StandIn
) -> None:
    net = Net().to("dev:0")
    train(net, devices)
    assert equals_plain(net, SGD)
    assert [sorted(order) for order, _ in nccl.calls] == [summed] * (STEPS if summed else 0)
    assert all(order[root] == "dev:0" for order, root in nccl.calls)


def test_gradients_travel_by_nccl_alone(nccl: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "reduce", lambda inputs, root: None)
    net = nn.Linear(5, 6, bias=False, dtype=F64, device="dev:0")
    with phalanx.Trainer(
        net,
        F.mse_loss,
        SGD,
        microbatches=None,
        replicas=["dev:0", "dev:1"],
        executor=phalanx.Threads(nccl=True),
    ) as t:
        t.step(batch(0, "dev:0"))
        before = torch.dev.copies("dev:1", "dev:0")
        t.step(batch(1, "dev:0"))
        assert torch.dev.copies("dev:1", "dev:0") == before


class Uneven(nn.Module):
    """Uses a parameter on the second device only, and one nowhere; the loss reaches the module."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere, self.there, self.nowhere = (
            nn.Parameter(torch.full((5,), value, dtype=F64)) for value in (2.0, 3.0, 4.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.everywhere
        return scaled * self.there if x.device.index == 1 else scaled


def test_what_only_some_devices_have_and_what_reaches_the_module_itself(nccl: StandIn) -> None:
    def gradients(reduce: str) -> list[Tensor | None]:
        net = Uneven().to("dev:0")
        x = batch(0, "dev:0")[0]

        def loss(module: nn.Module, part: Tensor) -> Tensor:
            return module(part).square().mean() + net.everywhere.square().sum().to(part.device)

        optimizer = partial(torch.optim.SGD, lr=1.0)
        options: Any = {"forward": loss, "replicas": ["dev:0", "dev:1"]}
        options["executor"] = phalanx.Threads(nccl=reduce == "nccl")
        with phalanx.Trainer(net, None, optimizer, **{"microbatches": None, **options}) as trainer:
            trainer.step(x)
        return [parameter.detach().cpu() for parameter in net.parameters()]

    assert_close(gradients("nccl"), gradients("tree"), F64)
    assert len(nccl.calls) == 1


@pytest.mark.parametrize("home", ["cpu", "dev:0"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_complex_numbers_and_modules_on_the_cpu(
    nccl: StandIn, dtype: torch.dtype, home: str
) -> None:
    def gradient(reduce: str) -> Tensor:
        net = nn.Linear(5, 6, bias=False, dtype=dtype)
        nn.init.constant_(net.weight, 0.5)
        with phalanx.DataParallel(net.to(home), ["dev:0", "dev:1"], reduce=reduce) as model:
            model(batch(0, home)[0].to(dtype)).abs().square().mean().backward()
        assert str(net.weight.grad.device) == home
        return net.weight.grad.cpu()

    assert_close(gradient("nccl"), gradient("tree"), F64)
    assert len(nccl.calls) == 1
