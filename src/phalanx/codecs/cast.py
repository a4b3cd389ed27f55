"""Gradients in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.codecs.codec import Codec, Payload
from phalanx.errors import ConfigError

__all__ = ["Cast"]


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
        return (self.saturate(gradient),)

    def restore(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the values in the gradient's own dtype."""
        return payload[0].to(dtype).view(shape)

    def saturate(self, gradient: Tensor, addends: int = 1) -> Tensor:
        """Return ``gradient`` as ``dtype``, so that ``addends`` such tensors can be added in it.

        No infinity arises out of finite values, here or in their sum in any order: every addition
        may round up by half an epsilon, so the bound leaves that much room for each.
        """
        facts = torch.finfo(self.dtype)
        limit = facts.max / addends * (1 + facts.eps) ** (1 - addends)
        largest = torch.finfo(gradient.dtype).max
        not_finite = gradient - gradient.clamp(-largest, largest)  # zero where it is finite
        return gradient.clamp(-limit, limit).add_(not_finite).to(self.dtype)
