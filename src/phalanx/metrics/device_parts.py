"""What one device has of a batch, for whoever counts it: outputs, labels and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.plan import flatten, unflatten
from phalanx.types import Nested

__all__ = ["Columns", "Part", "device_of", "gather", "has_rows", "is_scalar", "moved", "num_rows"]

# Outputs, labels or None, and one weight per row or None.
Part = tuple[Nested, Nested, Tensor | None]


class Columns(list[Any]):  # Any: tensors, or whatever else a module returns
    """Several outputs, or labels: a list with an entry for each, not for each row."""


def has_rows(part: Part | None) -> bool:
    """Tell whether there is anything to count in ``part``."""
    if part is None:
        return False
    tensors = _tensors_in(part[0])
    return not tensors or tensors[0].numel() > 0


def gather(parts: Sequence[Part], dims: tuple[int, int], device: torch.device) -> Part:
    """Return one part that holds the rows of all, on ``device``."""
    outputs, labels, weights = zip(*parts, strict=True)
    return (
        _gather(outputs, dims[0], device),
        _gather(labels, dims[1], device),
        _gather(weights, 0, device),
    )


def _gather(values: Sequence[Nested], dim: int, device: torch.device) -> Nested:
    """Join tensors and arrays along ``dim``, and lists, which hold one entry per row."""
    first = values[0]
    if isinstance(first, Tensor):
        here = [value.to(device) for value in values]
        return torch.cat(here, dim) if first.dim() else torch.stack(here)
    if isinstance(first, np.ndarray):
        return np.concatenate(values, dim) if first.ndim else np.stack(values)
    if isinstance(first, Columns):
        return Columns(_gather(each, dim, device) for each in zip(*values, strict=True))
    if isinstance(first, list):
        return [moved(each, device) for value in values for each in value]
    if isinstance(first, Mapping):
        return {key: _gather([value[key] for value in values], dim, device) for key in first}
    if isinstance(first, tuple) and all(isinstance(each, str) for each in first):
        return tuple(each for value in values for each in value)  # as `default_collate` joins texts
    if isinstance(first, tuple):
        return tuple(_gather(each, dim, device) for each in zip(*values, strict=True))
    return first


def moved(value: Nested, device: torch.device) -> Nested:
    """Return ``value`` with all its tensors on ``device``."""
    if isinstance(value, Columns):
        return Columns(moved(each, device) for each in value)
    leaves, spec = flatten(value)
    return unflatten(
        [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )


def device_of(part: Part, default: torch.device) -> torch.device:
    """Return where the outputs of ``part`` lie."""
    return next((tensor.device for tensor in _tensors_in(part[0])), default)


def is_scalar(value: Nested) -> bool:
    """Tell whether ``value`` is one number."""
    return isinstance(value, Tensor) and value.dim() == 0


def num_rows(labels: Nested) -> int | None:
    """Return how many rows the first tensor has that has any; None if none has."""
    return next((len(tensor) for tensor in _tensors_in(labels) if tensor.dim()), None)


def _tensors_in(value: Nested) -> list[Tensor]:
    leaves, _ = flatten(list(value) if isinstance(value, Columns) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
