"""The interface of gradient codecs, and the one that casts to 16 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.errors import ConfigError

Payload = tuple[Tensor, ...]


class Codec(ABC):
    """A compression of gradients: encoded before they are sent, decoded on arrival.

    A codec is a value without state; what it loses is remembered by
    :class:`~phalanx.codecs.Feedback`. Gradients that it does not take pass unchanged. To write one,
    override :meth:`shrink`, :meth:`restore` and, if it does not take every tensor, :meth:`takes`.

    It must keep three promises:

    * The payload's shapes and dtypes follow from the gradient's alone, never from its values: ranks
      receive payloads without being told their size.
    * What is not finite stays visible: where a gradient holds a NaN or an infinity, what comes out
      holds one too.
    * Payloads are merged by one rule: each is decoded, and the decoded are **added**. (Who wants a
      mean divides the sum; the codec does not know.)

    Attributes:
        has_error: Whether what it loses must be sent later (error feedback) for training to come to
            the same end.
    """

    has_error: ClassVar[bool]

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


@dataclass(frozen=True)
class Cast(Codec):
    """Send gradients as ``dtype``; values beyond its range become its largest, not infinity.

    Infinities and NaNs stay what they are. fp16 (``"fp16"``) keeps 11 significant bits and loses
    what is below 6e-8; bf16 (``"bf16"``) keeps 8 bits and the whole range of float32. Gradients
    that are as narrow already pass unchanged. Half the bytes of float32.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Example:
        >>> codec = Cast(torch.float16)
        >>> codec.encode(torch.tensor([1.0, 1e30, float("inf")]))[0].tolist()
        [1.0, 65504.0, inf]

    Raises:
        ConfigError: ``dtype`` is another one.
    """

    dtype: torch.dtype
    has_error: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f"`dtype` must be torch.float16 or torch.bfloat16, but is {self.dtype!r}."
            )

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Tell whether ``dtype`` is wider than what is sent."""
        return super().takes(shape, dtype) and dtype.itemsize > self.dtype.itemsize

    def shrink(self, gradient: Tensor) -> Payload:
        """Round to ``dtype``, within its range."""
        limit, largest = torch.finfo(self.dtype).max, torch.finfo(gradient.dtype).max
        not_finite = gradient - gradient.clamp(-largest, largest)  # zero where it is finite
        return (gradient.clamp(-limit, limit).add_(not_finite).to(self.dtype),)

    def restore(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the values in the gradient's own dtype."""
        return payload[0].to(dtype).view(shape)
