"""The rows of a microbatch, as a model may have them: what it writes there, the user does not see.

A microbatch is a part of the user's batch, in the same memory. Worker processes have copies. So
that a model that changes its inputs in place does the same everywhere, replicas in threads are
given copies, too: the first microbatches in any case, later ones if those were written to; of NumPy
arrays always, as they have no version that tells. Copies of tensors lie as their originals do, as
kernels may choose by alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan import flatten, unflatten
from phalanx.replicas.packing import copied
from phalanx.types import Nested

__all__ = ["Inputs", "WatchedInputs", "pieces_of", "placed"]

_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


class Inputs:
    """Whether a model writes to its inputs, as far as is known, while it trains and otherwise."""

    def __init__(self) -> None:
        self._written: dict[bool, bool] = {}

    def lend(
        self, batch: Nested, device: torch.device, *, trains: bool
    ) -> tuple[Nested, WatchedInputs]:
        """Return the batch on ``device``, whose slices have versions of their own.

        And what is to be told when the model has had them, by :meth:`note`.

        Raises:
            ConfigError: A tensor requires a gradient, and the model ``trains``.
        """
        copies = self.copies(trains)
        leaves, spec = flatten(batch)
        lent: dict[int, Any] = {}  # by id: one that is there twice stays one
        for leaf in leaves:
            if id(leaf) in lent:
                continue
            if isinstance(leaf, Tensor):
                if trains and leaf.requires_grad:
                    raise ConfigError(
                        "A batch must hold no tensor that requires a gradient, but does. Detach "
                        "it, or use `DataParallel` to train what stands before the module."
                    )
                lent[id(leaf)] = placed(leaf, device, copies)
            else:
                lent[id(leaf)] = leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        tensors = [leaf for leaf in lent.values() if isinstance(leaf, Tensor)]
        rows = unflatten([lent[id(leaf)] for leaf in leaves], spec)
        return rows, WatchedInputs(tensors, copies, trains)

    def copies(self, trains: bool) -> bool:
        """Tell whether the next microbatch is to be a copy."""
        return self._written.get(trains, True)

    def note(self, watched: WatchedInputs) -> None:
        """Learn whether a model has written to its inputs.

        Raises:
            UnsupportedError: It has written to what is not a copy: the model did not at first.
        """
        written = watched.were_written()
        if written and not watched.copies:
            raise UnsupportedError(
                "An input must stay as it is in `forward()` and in the loss, but was changed in "
                "place, and was not in the first microbatches. Change a copy: x = x.clone()."
            )
        if written or watched.trains not in self._written:
            self._written[watched.trains] = written


class WatchedInputs:
    """The inputs of one microbatch, and the versions that they had.

    Args:
        copies: Whether they are copies.
        trains: Whether the model trains on them.
    """

    def __init__(self, tensors: Sequence[Tensor], copies: bool, trains: bool) -> None:
        self._tensors = [each for each in tensors if not each.is_inference()]
        self._versions = [tensor._version for tensor in self._tensors]
        self.copies = copies
        self.trains = trains

    def were_written(self) -> bool:
        """Tell whether anybody has written to them since."""
        return self._versions != [tensor._version for tensor in self._tensors]


def placed(leaf: Tensor, device: torch.device, copies: bool) -> Tensor:
    """Return a tensor of the user's on ``device``, with a version of its own."""
    own = leaf.data  # slices share no version counter
    if own.device != device:
        own = own.to(device, non_blocking=device.type != "cpu")  # the host reads at once
    return copied(own) if copies and leaf.device == own.device else own


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """Return what holds a tensor's memory: a sparse or nested one has several pieces."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _BY_ROW:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMN:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.jagged:
        return [tensor.values()]
    return [tensor]
