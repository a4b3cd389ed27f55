"""What replicas on accelerators take is measured there: the host only sees them being told."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.execution import stopwatch
from phalanx.execution.stopwatch import Stopwatch
from tests.device.test_replicas import F64

ROWS = 41


class Slower(nn.Module):
    """Takes a second a row on the first device, and three on the second; the host sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        torch.dev.take_time(len(x) * (1.0, 3.0)[x.device.index])
        return x * self.scale


def shares_by_container(net: nn.Module, x: Tensor) -> tuple[float, ...]:
    with phalanx.DataParallel(net, ["dev:0", "dev:1"], workloads="auto") as model:
        for _ in range(12):
            F.mse_loss(model(x), x).backward()
        return tuple(model.workloads)


def shares_by_trainer(net: nn.Module, x: Tensor) -> tuple[float, ...]:
    options = {"replicas": ["dev:0", "dev:1"], "workloads": "auto"}
    optimizer = partial(torch.optim.SGD, lr=0.01)
    with phalanx.Trainer(
        net, F.mse_loss, optimizer, **{"microbatches": None, **options}
    ) as trainer:
        for _ in range(12):
            step = trainer.step((x, x))
    return step.shares


@pytest.mark.parametrize("shares", [shares_by_container, shares_by_trainer])
def test_workloads_follow_the_devices_own_clocks(shares, monkeypatch) -> None:
    x = torch.ones(ROWS, 5, dtype=F64, device="dev:0")
    first, second = shares(Slower().to("dev:0"), x)
    assert 2.5 < first / second < 3.5
    on_host = partial(Stopwatch.__init__, on_device=False)
    monkeypatch.setattr(
        stopwatch.Stopwatch,
        "__init__",
        lambda self, device, *, waited_s=None, on_device: on_host(self, device, waited_s=waited_s),
    )
    monkeypatch.setattr(stopwatch, "now_s", lambda: 0.0)  # as good as all that it sees
    first, second = shares(Slower().to("dev:0"), x)
    assert first / second < 1.5


def test_laps_are_read_without_waiting_in_between() -> None:
    device, waited_s = torch.device("dev", 1), iter([0.5, 0.5, 1.0])
    watch = Stopwatch(device, waited_s=lambda: next(waited_s), on_device=True)
    with torch.dev.device(1):
        for seconds in (2.0, 3.0):
            torch.ones(3, device=device) * 2
            torch.dev.take_time(seconds)
            watch.lap()
    assert not torch.dev.current_stream(1).query()
    first, second = watch.laps_s()
    assert 2.0 <= first < 2.4
    assert 2.5 <= second < 2.9
