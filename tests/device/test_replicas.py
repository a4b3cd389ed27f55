"""Replicas on the test device equal plain PyTorch, in containers and trainers, on mixed devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.replicas import Replica, Source, modes
from tests.products import some_by_day
from tests.zoo import assert_close

F64 = torch.float64
STEPS, ROWS = 8, 7
CONFIGURATIONS = {
    "two": (["dev:0", "dev:1"], None),
    "with the cpu": (["cpu", "dev:0"], None),
    "the cpu second": (["dev:0", "cpu"], None),
    "the other first": (["dev:1", "dev:0"], [1, 5]),
    "two on one": (["dev:0", "dev:1", "dev:1"], [3, 1, 2]),
    "two on the first": (["dev:0", "dev:0", "dev:1"], [1, 5, 9]),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    f"{kind.__name__}-{way}": partial(kind, **options, **{way: True})
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
    )
    for way in ("fused", "foreach")
}


class Net(nn.Module):
    """Two layers that a third one reuses, and a buffer that every pass writes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, data: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return F.linear(self.head(self.body(data).tanh()).tanh(), self.body.weight)


def batch(step: int, home: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, n, generator=generator, dtype=F64).to(home) for n in (5, 6))
    return x, y


def plain(optimizer: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
    net = Net()
    stepper = optimizer(net.parameters())
    for step in range(STEPS):
        x, y = batch(step, "cpu")
        stepper.zero_grad()
        F.mse_loss(net(x), y).backward()
        stepper.step()
    return list(net.parameters())


def by_container(net: nn.Module, devices: list[str], workloads: Any, optimizer: Any) -> None:
    with phalanx.DataParallel(net, devices, workloads=workloads) as model:
        stepper = optimizer(model.parameters())
        for step in range(STEPS):
            x, y = batch(step, devices[0])
            stepper.zero_grad()
            F.mse_loss(model(x), y).backward()
            stepper.step()


def by_trainer(net: nn.Module, devices: list[str], _: Any, optimizer: Any) -> None:
    with phalanx.Trainer(
        net, F.mse_loss, optimizer, microbatches=None, replicas=devices
    ) as trainer:
        for step in range(STEPS):
            trainer.step(batch(step, devices[0]))


WAYS = {"container": by_container, "trainer": by_trainer}


@some_by_day("way, configuration, optimizer", list(WAYS), list(CONFIGURATIONS), list(OPTIMIZERS))
def test_training_equals_plain_pytorch(way: str, configuration: str, optimizer: str) -> None:
    devices, workloads = CONFIGURATIONS[configuration]
    net = Net().to(devices[0])
    WAYS[way](net, devices, workloads, OPTIMIZERS[optimizer])
    found = [parameter.detach().cpu() for parameter in net.parameters()]
    torch.testing.assert_close(found, plain(OPTIMIZERS[optimizer]), rtol=0, atol=1e-12)
    assert {str(parameter.device) for parameter in net.parameters()} == {devices[0]}


# -- hazards, each planted in Phalanx --------------------------------


def test_a_replica_elsewhere_that_is_not_refreshed_would_be_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Source, "update_copies", lambda self: None)
    net = Net().to("dev:0")
    by_container(net, ["dev:0", "dev:1"], None, OPTIMIZERS["SGD-fused"])
    assert not equals_plain(net, OPTIMIZERS["SGD-fused"])


def test_a_gradient_that_is_added_twice_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Replica.pop_gradients

    def take_twice(self: Replica, **options: bool) -> list[Tensor | None]:
        found = take(self, **options)
        twice = self.device.index == 1
        return [None if g is None else g * 2 if twice else g for g in found]

    monkeypatch.setattr(Replica, "pop_gradients", take_twice)
    net = Net().to("dev:0")
    by_container(net, ["dev:0", "dev:1"], None, OPTIMIZERS["SGD-fused"])
    assert not equals_plain(net, OPTIMIZERS["SGD-fused"])


def equals_plain(net: nn.Module, optimizer: Any) -> bool:
    found = [parameter.detach().cpu() for parameter in net.parameters()]
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-12)
        for a, b in zip(found, plain(optimizer), strict=True)
    )


def on_side_streams(run: Callable[[], Any]) -> Any:
    """Run on streams of the caller's own, with the care that he must take himself."""
    before = [torch.dev.current_stream(index) for index in range(torch.dev.device_count())]
    streams = [torch.Stream(f"dev:{each.device_index}") for each in before]
    for own, other in zip(streams, before, strict=True):
        own.wait_stream(other)
    with ExitStack() as stack:
        for stream in reversed(streams):
            stack.enter_context(stream)
        found = run()
    for own, other in zip(streams, before, strict=True):
        other.wait_stream(own)
    return found


@pytest.mark.parametrize("planted", [False, True])
def test_gradients_of_inputs_are_ready_on_the_callers_stream(
    planted: bool, monkeypatch: pytest.MonkeyPatch, raises_race: Any
) -> None:
    """Torch's thread for backward passes knows the stream of the outputs' device only."""
    other = f"dev:{torch.dev.device_count() - 1}"
    if planted and other == "dev:1":
        pytest.skip("needs three devices: of the outputs, of the inputs, and of a replica")

    def gradient() -> Tensor:
        x = (batch(0, "dev:1")[0] * 1).requires_grad_()
        y = (x * 2).sin()
        with phalanx.DataParallel(net, ["dev:0", other]) as model:
            F.mse_loss(model(y), batch(0, "dev:0")[1]).backward()
        return x.grad * 1

    net = Net().to("dev:0")
    if planted:
        monkeypatch.setattr(modes.CallerModes, "on_streams", lambda self: nullcontext())
        with raises_race("has not waited"):
            on_side_streams(gradient)
        return
    found = on_side_streams(gradient)
    x = batch(0, "cpu")[0].requires_grad_()
    F.mse_loss(Net()((x * 2).sin()), batch(0, "cpu")[1]).backward()
    assert_close(found.cpu(), x.grad, F64)


class Custom(nn.Module):
    """Calls a kernel of the user's own, and makes a tensor on the current device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        torch.dev.scale_at(y.data_ptr(), y.numel(), 3.0)
        return y + torch.ones(5, dtype=F64, device="dev")


def test_a_replicas_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Custom().to("dev:0"), batch(0, "dev:0")[0]
    with phalanx.DataParallel(net, ["dev:0", "dev:1"]) as model, torch.no_grad():
        assert_close(model(x), x * 3 + 1, F64)
        assert torch.dev.current_device() == 0
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        with pytest.raises(RuntimeError, match=r"A kernel on dev:. got the address .* of dev:."):
            model(x)


# -- other ways to run -----------------------------------------------


def test_autocast_of_the_caller_is_that_of_all_replicas() -> None:
    net, x = Net().float().to("dev:0"), batch(0, "dev:0")[0].float()
    with phalanx.DataParallel(net, ["dev:0", "dev:1"]) as model:
        with torch.autocast("dev", dtype=torch.bfloat16):
            found, expected = model(x), net(x)
            assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        assert model(x).dtype == torch.float32
