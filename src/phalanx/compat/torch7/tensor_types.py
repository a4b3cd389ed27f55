"""Torch7's names of tensor types, which say dtype and device in one word."""

from __future__ import annotations

import itertools
import re

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.replicas import accelerator_kind, resolve_device

__all__ = ["parse_tensor_type", "tensor_type_of"]

_DTYPE_BY_WORD = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
}
_WORD_BY_DTYPE = {dtype: word for word, dtype in _DTYPE_BY_WORD.items()}
_WRITTEN = re.compile(r"torch\.(?:(cuda)\.)?(Cuda)?(\w*?)Tensor")


def tensor_type_of(module: nn.Module) -> str:
    """Return the type of the first floating-point parameter or buffer, as Torch7 names it.

    Example:
        >>> tensor_type_of(nn.Linear(2, 1).double())
        'torch.DoubleTensor'
    """
    tensors = itertools.chain(module.parameters(), module.buffers(), [torch.empty(0)])
    found = next(tensor for tensor in tensors if tensor.is_floating_point())
    word = _WORD_BY_DTYPE.get(found.dtype, str(found.dtype).removeprefix("torch."))
    if found.device.type not in ("cpu", "meta"):
        return f"torch.Cuda{'' if word == 'Float' else word}Tensor"
    return f"torch.{word}Tensor"


def parse_tensor_type(kind: str | torch.dtype) -> tuple[torch.device | None, torch.dtype]:
    """Return what ``kind`` says of device (None: nothing) and dtype.

    Example:
        >>> parse_tensor_type("torch.FloatTensor")
        (device(type='cpu'), torch.float32)

    Raises:
        ConfigError: It is no floating-point type, or there is no accelerator here.
    """
    if isinstance(kind, torch.dtype) and kind.is_floating_point:
        return None, kind
    match = _WRITTEN.fullmatch(kind) if isinstance(kind, str) else None
    word = match[3] or ("Float" if match[2] else "") if match else ""
    if match is None or word not in _DTYPE_BY_WORD:
        raise ConfigError(
            "`type` must be the name of a floating-point type, such as 'torch.FloatTensor' or "
            f"'torch.CudaTensor', or a dtype, but is {kind!r}."
        )
    kind = accelerator_kind() if match[1] or match[2] else "cpu"
    return resolve_device(kind), _DTYPE_BY_WORD[word]
