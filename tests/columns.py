"""Layers cut into columns for a `ModelParallel`, in plain PyTorch, and put back together."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.plan import equal_sizes

__all__ = ["columns_of_layer", "layer_of_columns"]


# Any, here and below: a linear layer or a convolution.
def columns_of_layer(layer: Any, parts: int | Sequence[int]) -> list[Any]:
    """Cut a layer along its output features or channels."""
    sizes = equal_sizes(len(layer.weight), parts) if isinstance(parts, int) else list(parts)
    weights, biases = layer.weight.split(sizes), layer.bias.split(sizes)
    return [_with(layer, *both) for both in zip(weights, biases, strict=True)]


def layer_of_columns(columns: Iterable[Any]) -> Any:
    """Join columns to one layer."""
    first, *others = columns
    weights, biases = zip(*((each.weight, each.bias) for each in (first, *others)), strict=True)
    place = first.weight.device
    return _with(
        first,
        torch.cat([each.to(place) for each in weights]),
        torch.cat([each.to(place) for each in biases]),
    )


def _with(layer: Any, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    made = copy.deepcopy(layer)
    made.weight = nn.Parameter(weight.detach().clone())
    made.bias = nn.Parameter(bias.detach().clone())
    setattr(made, "out_features" if isinstance(layer, nn.Linear) else "out_channels", len(bias))
    return made
