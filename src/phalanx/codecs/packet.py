"""Several tensors as one run of bytes, so that they travel in one message.

    packet   | tensor 0 |pad| tensor 1 ........ |pad| tensor 2 |pad|

Each starts at a multiple of 16 bytes, so that it can be read where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]

_ALIGN_BYTES = 16  # no element of torch is wider


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy ``tensors``, at least one and all on one device, into one uint8 vector."""
    spans = list(_spans(tensors))
    packet = tensors[0].new_zeros(spans[-1][1], dtype=torch.uint8)
    for tensor, (start, _) in zip(tensors, spans, strict=True):
        _view(packet, start, tensor).copy_(tensor)
    return packet


def unpack(packet: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the tensors in ``packet``, which have the shapes and dtypes of ``like``.

    Example:
        >>> tensors = [torch.arange(3), torch.tensor([[0.5]])]
        >>> unpack(pack(tensors), tensors)
        [tensor([0, 1, 2]), tensor([[0.5000]])]
    """
    return [
        _view(packet, start, tensor) for tensor, (start, _) in zip(like, _spans(like), strict=True)
    ]


def _spans(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    start = 0
    for tensor in tensors:
        stop = start + -(-tensor.numel() * tensor.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        yield start, stop
        start = stop


def _view(packet: Tensor, start: int, like: Tensor) -> Tensor:
    piece = packet[start : start + like.numel() * like.itemsize]
    return piece.view(like.dtype).view(like.shape)
