"""The interface of gradient codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Payload = tuple[Tensor, ...]


class Codec(ABC):
    """A compression of gradients: encoded before they are sent, decoded on arrival.

    A codec is a value without state; what it loses is remembered by
    :class:`~phalanx.codecs.Feedback`, and sent later. Gradients that it does not take pass
    unchanged. To write one, override :meth:`shrink`, :meth:`restore` and, if it does not take every
    tensor, :meth:`takes`.

    It must keep three promises:

    * The payload's shapes and dtypes follow from the gradient's alone, never from its values: ranks
      receive payloads without being told their size.
    * What is not finite stays visible: where a gradient holds a NaN or an infinity, what comes out
      holds one too.
    * Payloads are merged by one rule: each is decoded, and the decoded are **added**. (Who wants a
      mean divides the sum; the codec does not know.)
    """

    def encode(self, gradient: Tensor) -> Payload:
        """Return ``gradient``, of any shape, as the tensors that travel.

        A gradient that the codec does not take is its own payload, not copied.
        """
        if self.takes(gradient.shape, gradient.dtype):
            return self.shrink(gradient)
        return (gradient,)

    def decode(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return what ``payload``, of a gradient of this shape and dtype, stands for."""
        if self.takes(shape, dtype):
            return self.restore(payload, shape, dtype)
        return payload[0]

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Tell whether gradients of this kind are made smaller; by default all that are real."""
        return dtype.is_floating_point and shape.numel() > 0

    @abstractmethod
    def shrink(self, gradient: Tensor) -> Payload:
        """Encode a gradient that the codec takes."""

    @abstractmethod
    def restore(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Undo :meth:`shrink` as far as that can be done."""
