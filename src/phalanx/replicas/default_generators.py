"""Torch's default generators: one of the CPU, one of each accelerator, for all threads."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["accelerator_module", "default_generators", "default_states", "drawing_from"]

_lock = threading.Lock()  # held while one of them stands elsewhere


def default_generators() -> list[torch.Generator]:
    """Return those of the CPU and of each accelerator that torch has begun to use."""
    return [torch.default_generator, *getattr(accelerator_module(), "default_generators", ())]


def default_states() -> list[Tensor]:
    """Return where they stand when no thread is in :func:`drawing_from`."""
    with _lock:
        return [each.get_state() for each in default_generators()]


@contextmanager
def drawing_from(own: torch.Generator) -> Iterator[None]:
    """Let operators draw from ``own`` that would draw from its device's default generator.

    One thread does this at a time. Nobody else may use that generator meanwhile, nor read or set
    it, as `torch.utils.checkpoint` does: it is for replicas that have their device to themselves.
    """
    default = _default_of(own.device)
    with _lock:
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


def _default_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    found: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return found


def accelerator_module() -> types.ModuleType | None:
    """Return the module of this machine's accelerators, such as `torch.cuda`; None without any."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return None if kind is None else torch.get_device_module(kind)
