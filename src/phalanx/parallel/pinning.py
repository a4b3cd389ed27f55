"""Modules that keep their device when the model around them is moved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["keeping"]


def keeping(fn: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return ``fn`` without its moves to other devices: tensors are kept on, or go to, ``device``.

    Whether it moves is asked with a small tensor: the module may be pinned because it fits nowhere
    else.
    """

    def kept(tensor: Tensor) -> Tensor:
        probe = _probe(fn, tensor)
        if probe.device == tensor.device:
            return fn(tensor)
        for form, num_dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if probe.dim() == num_dims and probe.is_contiguous(memory_format=form):
                return tensor.to(device, probe.dtype, memory_format=form)
        return tensor.to(device, probe.dtype)

    return kept


def _probe(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return what ``fn`` makes of a tensor like ``tensor``, with two elements along each dim."""
    size = [0] if is_lazy(tensor) else [2] * tensor.dim()
    try:
        return fn(torch.empty(size, dtype=tensor.dtype, device=tensor.device))
    except NotImplementedError:
        if not tensor.is_meta:
            raise
        return fn(torch.empty(size, dtype=tensor.dtype))  # nothing can be copied out of "meta"
