"""Tensors that travel to another device in one buffer, and not one at a time.

    tensors   a ..   b .....   c .        on their device
              ▼      ▼         ▼
    buffer   | a ..|pad| b .....|pad| c . |pad|  ──► the same on another device

Each begins at 64 bytes, as kernels may choose by alignment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.ipc import ALIGN_BYTES
from phalanx.memory import dense_strides
from phalanx.torch_internals import foreach_copy

__all__ = ["FlatLayout", "sent_at_once"]


class FlatLayout:
    """Where tensors of one dtype lie in a buffer.

    Args:
        tensors: At least one; they need not lie without gaps themselves.

    Example:
        >>> layout = FlatLayout([torch.ones(3), torch.ones(2, 2)])
        >>> flat = layout.zeros(torch.device("cpu"))
        >>> flat.numel(), [tuple(place.shape) for place in layout.places_in(flat)]
        (32, [(3,), (2, 2)])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.dtype = tensors[0].dtype
        step = ALIGN_BYTES // tensors[0].itemsize
        sizes = [-(-each.numel() // step) * step for each in tensors]
        self._starts = [0, *itertools.accumulate(sizes)]
        self._shapes = [(each.shape, dense_strides(each)) for each in tensors]

    def zeros(self, device: torch.device) -> Tensor:
        """Return a new buffer on ``device``."""
        return torch.zeros(self._starts[-1], dtype=self.dtype, device=device)

    def places_in(self, flat: Tensor) -> list[Tensor]:
        """Return tensors in the memory of ``flat``, each with a version of its own."""
        storage = flat.untyped_storage()
        return [
            torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, start, *shape)
            for start, shape in zip(self._starts, self._shapes, strict=False)
        ]


def sent_at_once(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies of ``tensors``, which lie on one other device and are of one dtype.

    Moves: their bytes, each padded to 64, in one copy. Between accelerators the host does not wait.

    Example:
        >>> sent_at_once([torch.ones(2)], torch.device("cpu"))
        [tensor([1., 1.])]
    """
    layout = FlatLayout(tensors)
    flat = layout.zeros(tensors[0].device)
    foreach_copy(layout.places_in(flat), list(tensors))
    return layout.places_in(flat.to(device, non_blocking=device.type != "cpu"))
