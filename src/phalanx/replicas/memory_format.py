"""Lay the weights of convolutions out as the CPU's kernels like them best.

With channels_last weights torch's convolutions, and what follows them, run without reordering their
data; a small CNN's step took two thirds of the time. Values are the same, rounding is the same for
every formation. It is a rule, not a trial, because a trial's timing must not decide over bits.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["restore_memory_format", "use_channels_last", "wants_channels_last"]


def wants_channels_last(module: nn.Module) -> bool:
    """Tell whether ``module`` holds 2-D convolutions that see channels together."""
    return any(
        isinstance(child, nn.Conv2d) and child.groups < max(2, child.in_channels)
        for child in module.modules()
    )


def use_channels_last(module: nn.Module) -> None:
    """Reorder all 4-D parameters of ``module`` in place; their values and shapes stay."""
    _reorder(module, torch.channels_last)


def restore_memory_format(module: nn.Module) -> None:
    """Put all 4-D parameters back into the order of their dims."""
    _reorder(module, torch.contiguous_format)


def _reorder(module: nn.Module, memory_format: torch.memory_format) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
