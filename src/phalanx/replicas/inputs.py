"""The rows of a microbatch, as a model may have them: what it writes there, the user does not see.

A microbatch is a part of the user's batch, in the same memory. Worker processes have copies. So
that a model that changes its inputs in place does the same everywhere, replicas in threads are
given copies, too: the first microbatches in any case, later ones if those were written to; of NumPy
arrays always, as they have no version that tells. Copies of tensors lie as their originals do, as
kernels may choose by alignment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan import flatten, unflatten
from phalanx.replicas.parcel import copied
from phalanx.types import Nested

__all__ = ["Inputs", "placed"]


class Inputs:
    """Whether a model writes to its inputs, as far as is known, while it trains and otherwise."""

    def __init__(self) -> None:
        self._written: dict[bool, bool] = {}

    @contextlib.contextmanager
    def lent(self, batch: Nested, device: torch.device, *, trains: bool) -> Iterator[Nested]:
        """Give the body the batch on ``device``; its slices have versions of their own.

        Raises:
            ConfigError: A tensor requires a gradient, and the body ``trains``.
            UnsupportedError: As :meth:`watched`.
        """
        copies = self.copies(trains)
        leaves, spec = flatten(batch)
        given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        if trains and any(leaf.requires_grad for leaf in given.values()):
            raise ConfigError(
                "A batch must hold no tensor that requires a gradient, but does. Detach it, or use "
                "`DataParallel` to train what stands before the module."
            )
        own = {key: placed(leaf, device, copies) for key, leaf in given.items()}
        with self.watched(list(own.values()), copies, trains=trains):
            arrays = {id(leaf): leaf.copy() for leaf in leaves if isinstance(leaf, np.ndarray)}
            yield unflatten(
                [own.get(id(leaf), arrays.get(id(leaf), leaf)) for leaf in leaves], spec
            )

    def copies(self, trains: bool) -> bool:
        """Tell whether the next microbatch is to be a copy."""
        return self._written.get(trains, True)

    @contextlib.contextmanager
    def watched(self, tensors: Sequence[Tensor], copies: bool, *, trains: bool) -> Iterator[None]:
        """Learn whether the body writes to ``tensors``, which are ``copies`` or not.

        Raises:
            UnsupportedError: It has written to what is not a copy: the model did not at first.
        """
        tensors = [each for each in tensors if not each.is_inference()]
        before = [tensor._version for tensor in tensors]
        yield
        written = before != [tensor._version for tensor in tensors]
        if written and not copies:
            raise UnsupportedError(
                "An input must stay as it is in `forward()` and in the loss, but was changed in "
                "place, and was not in the first microbatches. Change a copy: x = x.clone()."
            )
        if written or trains not in self._written:
            self._written[trains] = written


def placed(leaf: Tensor, device: torch.device, copies: bool) -> Tensor:
    """Return a tensor of the user's on ``device``, with a version of its own."""
    own = leaf.data.to(device, non_blocking=True)  # `data`: slices share no version counter
    return copied(own) if copies and leaf.device == own.device else own
