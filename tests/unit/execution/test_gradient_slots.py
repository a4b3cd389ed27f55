"""The slots of gradients are on the CPU, and free again when nobody holds them."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import nn

from phalanx.execution.gradient_slots import GradientSlots
from phalanx.memory import SharedMemoryPool


def test_no_python_runs_when_a_slot_is_dropped_so_that_a_ctrl_c_is_not_lost_there() -> None:
    slots = GradientSlots([nn.Parameter(torch.zeros(3))], SharedMemoryPool())
    first = slots.allocate()
    begin, called = first.start, []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    del first
    sys.setprofile(None)
    assert called == []
    assert slots.allocate().start == begin


def test_gradients_are_on_the_cpu_under_any_default_device() -> None:
    slots = GradientSlots([nn.Parameter(torch.zeros(0))], SharedMemoryPool())
    with torch.device("meta"):
        assert slots.allocate().gradients[0].device.type == "cpu"
