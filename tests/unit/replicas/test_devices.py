"""What a user's words for devices stand for, on machines with and without accelerators."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.replicas import known_devices, resolve_device, resolve_devices

CPU = torch.device("cpu")


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch tell of two CUDA devices, which nobody may touch."""
    kind = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


# --- one device -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cpu", CPU),
        ("cpu:0", CPU),
        (torch.device("cpu", 3), CPU),  # there is one CPU, whatever its number
        ("cuda", cuda(0)),
        ("cuda:0", cuda(0)),
        ("cuda:1", cuda(1)),
        (cuda(1), cuda(1)),
    ],
)
def test_a_name_stands_for_a_device_with_its_index(name: Any, found: torch.device) -> None:
    assert resolve_device(name) == found


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["cuda:2", "cuda:7"])
def test_a_device_that_is_not_there_is_refused_with_how_many_there_are(name: str) -> None:
    match = f"`devices` must exist on this machine, but '{name}' does not: it has 2 device(s) of "
    with pytest.raises(
        ConfigError, match=re.escape(match) + "kind 'cuda'. Give 'cuda:1' or a lower one."
    ):
        resolve_device(name)


# --- several --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("devices", "home", "found"),
    [
        (None, CPU, (CPU, CPU)),
        (None, cuda(1), (cuda(0), cuda(1))),  # all of the kind on which the module lies
        (1, CPU, (CPU,)),
        (3, CPU, (CPU, CPU, CPU)),
        (2, cuda(1), (cuda(1), cuda(1))),
        (["cpu"], cuda(0), (CPU,)),
        (("cuda", "cpu", "cuda:1"), CPU, (cuda(0), CPU, cuda(1))),
    ],
)
def test_one_device_per_replica(devices: Any, home: torch.device, found: Any) -> None:
    assert resolve_devices(devices, home) == found


# --- what there is --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gpu")
def test_without_an_accelerator_the_cpu_is_all_there_is() -> None:
    assert known_devices() == (CPU,)


@pytest.mark.usefixtures("two_gpus")
def test_accelerators_are_all_there_is_where_there_are_any() -> None:
    assert known_devices() == (cuda(0), cuda(1))
