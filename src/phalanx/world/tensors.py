"""Tensors as the collectives take them: dense, on the CPU, flat and contiguous."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import UnsupportedError

__all__ = ["Flat", "flat_of"]


class Flat(NamedTuple):
    """A tensor, and its elements in one line: its own memory, or a copy if they lie apart.

    Attributes:
        tensor: As the user gave it.
        data: Its elements in order, one dimension.
        copied: Whether they are a copy.
    """

    tensor: Tensor
    data: Tensor
    copied: bool

    def write_back(self) -> None:
        """Bring what is in ``data`` to the tensor, where that is a copy."""
        if self.copied:
            self.tensor.copy_(self.data.view(self.tensor.shape))


def flat_of(tensor: Tensor, name: str) -> Flat:
    """Return ``tensor`` in one line.

    Raises:
        UnsupportedError: It is on another device, or sparse.
    """
    if not tensor.is_cpu:
        raise UnsupportedError(
            f"`{name}` must be on the CPU, but is on {tensor.device}. Use a group of another "
            'backend for it, such as `new_group(backend="nccl")`.'
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"`{name}` must be dense, but is of layout {tensor.layout}. Give `.to_dense()`."
        )
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        if plain.numel() != 1:
            return Flat(plain, plain if plain.dim() == 1 else plain.view(-1), False)
        # Its view would keep whatever stride a single element has.
        return Flat(plain, plain.as_strided((1,), (1,), plain.storage_offset()), False)
    return Flat(plain, plain.resolve_conj().resolve_neg().contiguous().view(-1), True)
