"""Tensors as users give them: read from whatever holds numbers, and refused where none can be read.

Shape legend: as each tensor's own description says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.executor_group.batches import DataDesc

__all__ = ["as_bound", "check_dense", "read_tensor", "savable"]


# Any: whatever the user gave.
def read_tensor(name: str, value: Any) -> Tensor:
    """Return ``value`` as a dense tensor: itself, or a view of an array where torch can have one.

    Raises:
        ConfigError: It is no tensor and no array, or holds nothing that torch can compute with.
    """
    if not isinstance(value, Tensor):
        value = _from_array(name, value)
    check_dense(name, value)
    tensor: Tensor = value
    return tensor


def check_dense(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose rows cannot be cut: sparse, nested, or without values.

    Raises:
        ConfigError: It is one.
    """
    if tensor.is_nested:
        told = "nested. Give a padded one: torch.nested.to_padded_tensor(…)"
    elif tensor.layout is not torch.strided:
        told = f"{tensor.layout}. Give {name}.to_dense()"
    elif tensor.is_meta:
        told = "on the meta device, where there are none"
    else:
        return
    raise ConfigError(f"`{name}` must be a dense tensor with values, but is {told}.")


def savable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy of one of inference mode, which no graph could save."""
    return tensor.clone() if tensor.is_inference() else tensor


def as_bound(tensor: Tensor, desc: DataDesc) -> Tensor:
    """Return ``tensor`` in the dtype of ``desc``, where that loses no kind of number.

    Raises:
        ConfigError: It has other dims, or a dtype that cannot be converted.
    """
    if tensor.dim() != len(desc.shape):
        raise ConfigError(
            f"`{desc.name}` must have {len(desc.shape)} dims like {desc.shape}, as bound, but has "
            f"shape {tuple(tensor.shape)}. Call `reshape` to bind it to another."
        )
    if desc.dtype is None or tensor.dtype == desc.dtype:
        return tensor
    if not torch.can_cast(tensor.dtype, desc.dtype):
        raise ConfigError(
            f"`{desc.name}` must be {desc.dtype} as bound, but is {tensor.dtype}. Convert it, or "
            "call `reshape` to bind it to another."
        )
    return tensor.to(desc.dtype)


def _from_array(name: str, value: Any) -> Tensor:  # Any: whatever the user gave
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # such as a list of ragged rows
        raise _no_tensor(name, value) from error
    if isinstance(value, np.ndarray) and array.dtype.kind not in "biufc":
        raise ConfigError(
            f"`{name}` must hold numbers that torch knows, but has dtype {array.dtype}. Convert "
            "it: array.astype('int64'), say."
        )
    try:
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        # A copy of what torch cannot view: read-only memory, negative strides.
        return torch.as_tensor(np.require(native, requirements=["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tensor(name, value) from error


def _no_tensor(name: str, value: Any) -> ConfigError:  # Any: whatever the user gave
    way_out = ""
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        way_out = " Join them: torch.stack(…)."
    told = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"{value!r:.80}"
    return ConfigError(f"`{name}` must be a tensor or an array, but is {told}.{way_out}")
