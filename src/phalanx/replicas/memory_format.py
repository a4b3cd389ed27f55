"""Lay the weights of convolutions out as the CPU's kernels like them best.

With channels_last weights torch's convolutions, and what follows them, run without reordering their
data; a small CNN's step took two thirds of the time. Values are the same, rounding is the same for
every formation. It is a rule, not a trial, because a trial's timing must not decide over bits.

The rule names every kind of module that a model may hold. Others keep their layout: torch 2.13
returns wrong gradients for `InstanceNorm2d` on one row in channels_last memory, and what the
`forward()` of a user's class does with a layout cannot be known.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

__all__ = [
    "KNOWN_KINDS",
    "restore_memory_format",
    "use_channels_last",
    "wants_channels_last",
    "warn_of_second_run",
]

# Each gives the same outputs and gradients in both layouts: a test compares them.
KNOWN_KINDS = frozenset(
    {
        nn.AdaptiveAvgPool2d,
        nn.AvgPool2d,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.Conv2d,
        nn.Dropout,
        nn.ELU,
        nn.Flatten,
        nn.GELU,
        nn.Identity,
        nn.LeakyReLU,
        nn.Linear,
        nn.LogSoftmax,
        nn.MaxPool2d,
        nn.ReLU,
        nn.ReLU6,
        nn.Sequential,
        nn.SiLU,
        nn.Sigmoid,
        nn.Softmax,
        nn.Tanh,
    }
)


def wants_channels_last(module: nn.Module) -> bool:
    """Tell whether ``module`` runs faster in channels_last, and is known to compute the same so.

    That is: it lies on the CPU, all its parts are of `KNOWN_KINDS`, it has 2-D convolutions that
    see channels together, and what leaves it is flat, because others may depend on the layout.
    """
    parts = list(module.modules())
    if any(type(part) not in KNOWN_KINDS for part in parts):
        return False
    if any(parameter.device.type != "cpu" for parameter in module.parameters()):
        return False
    kinds = [type(part) for part in reversed(parts)]
    if nn.Flatten not in kinds or nn.Conv2d in kinds[: kinds.index(nn.Flatten)]:
        return False
    return any(
        isinstance(part, nn.Conv2d) and part.groups < max(2, part.in_channels) for part in parts
    )


def use_channels_last(module: nn.Module) -> None:
    """Reorder all 4-D parameters of ``module`` in place; their values and shapes stay."""
    _reorder(module, torch.channels_last)


def restore_memory_format(module: nn.Module) -> None:
    """Put all 4-D parameters back into the order of their dims."""
    _reorder(module, torch.contiguous_format)


def warn_of_second_run(cause: Exception) -> None:
    """Say that a batch succeeded only without channels_last weights, and so ran twice."""
    warnings.warn(
        "The first batch failed with channels_last weights, so it ran once more without "
        f"({type(cause).__name__}: {cause}). Give channels_last=False.",
        stacklevel=2,
    )


def _reorder(module: nn.Module, memory_format: torch.memory_format) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
