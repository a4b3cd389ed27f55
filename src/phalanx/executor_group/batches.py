"""What a group is bound to and what it is fed: descriptions of tensors, and batches of them.

Shape legend: B rows of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError

__all__ = ["DataBatch", "DataDesc", "read_descs"]


@dataclasses.dataclass(frozen=True)
class DataDesc:
    """A tensor that goes in or comes out, by name.

    Args:
        name: The argument of the module's forward; for outputs, any.
        shape: For the whole batch.
        dtype: Batches are converted to it, where that loses no kind of number; a `torch.dtype`, or
            NumPy's or its name. None: as they come.
        layout: One letter per dim, such as "NCHW" or "TNC". N is the batch axis, along which the
            tensor is cut; without N it is given whole to every device, and as an output it is the
            first device's. None: N comes first.

    Example:
        >>> DataDesc("data", (3, 8, 7), layout="TNC").batch_axis
        1
        >>> DataDesc("mask", (7,), layout="C").batch_axis is None
        True

    Raises:
        ConfigError: One of them cannot be read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        name: object = self.name  # what the user wrote may be anything
        if not isinstance(name, str) or not name:
            raise ConfigError(f"`name` must be a text, but is {name!r}.")
        object.__setattr__(self, "shape", _read_shape(self.name, self.shape))
        object.__setattr__(self, "dtype", _read_dtype(self.name, self.dtype))
        _check_layout(self.name, self.layout, len(self.shape))

    @property
    def batch_axis(self) -> int | None:
        """The dim of N, or None for what is given whole."""
        if self.layout is None:
            return 0 if self.shape else None
        return self.layout.find("N") if "N" in self.layout else None

    @property
    def rows(self) -> int | None:
        """B, or None for what is given whole."""
        axis = self.batch_axis
        return None if axis is None else self.shape[axis]

    @staticmethod
    def of(value: Any) -> DataDesc:  # Any: whatever the user wrote
        """Read a description: one already, or (name, shape), (name, shape, dtype, layout)."""
        if isinstance(value, DataDesc):
            return value
        if not isinstance(value, (tuple, list)) or not 2 <= len(value) <= 4:
            raise ConfigError(
                f"`data` and `labels` must hold (name, shape) or `DataDesc`s, but hold {value!r}. "
                "Give DataDesc('data', (32, 10)), say."
            )
        return DataDesc(*value)

    def with_shape(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> DataDesc:
        """Return the description of a tensor alike, but of another shape."""
        return dataclasses.replace(self, shape=tuple(shape), dtype=dtype or self.dtype)


class DataBatch:
    """One batch: inputs, and what belongs to them.

    Its positions are those of MXNet's Python (data, label, pad, index) or of its Scala (data,
    label, index, pad): whichever of the last two is a whole number is the pad.

    Args:
        data: By name, or a tuple or list in the order of the bound names, or the one input; tensors
            or NumPy arrays.
        label: Likewise; None where there are none.
        pad: How many of the last rows only fill the batch up. They count nowhere: not in outputs,
            gradients, statistics or metrics.
        index: MXNet's, like all that follow it; taken and not used.

    Example:
        >>> batch = DataBatch([torch.ones(4, 2)], [torch.tensor([0, 1, 1, 0])], pad=1)
        >>> batch.pad, DataBatch(batch.data, batch.label, None, 1).pad
        (1, 1)
    """

    # Any: tensors in any of their forms; what is not used.
    def __init__(
        self,
        data: Any,
        label: Any = None,
        pad: Any = None,
        index: Any = None,
        bucket_key: Any = None,
        provide_data: Any = None,
        provide_label: Any = None,
    ) -> None:
        del bucket_key, provide_data, provide_label
        by_scala = pad is None and isinstance(index, Integral)
        if by_scala or isinstance(pad, (list, tuple, np.ndarray, Tensor)):
            pad = index
        self.data, self.label = data, label
        self.pad = 0 if pad is None else pad

    def __repr__(self) -> str:
        return f"DataBatch({self.data!r:.80}, {self.label!r:.80}, pad={self.pad})"


# Any: whatever the user wrote.
def read_descs(given: Any, noun: str) -> tuple[DataDesc, ...]:
    """Read the descriptions of ``noun``: a sequence, or shapes by name, or one.

    Raises:
        ConfigError: They cannot be read, or two have one name.
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        given = list(given.items())
    if isinstance(given, DataDesc):
        given = [given]
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(
            f"`{noun}` must be a sequence of `DataDesc`s or of (name, shape), but is {given!r}."
        )
    descs = tuple(DataDesc.of(each) for each in given)
    names = [each.name for each in descs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"`{noun}` must name each tensor once, but names {name!r} twice.")
    return descs


def _read_shape(name: str, shape: Any) -> tuple[int, ...]:  # Any: whatever the user wrote
    whole = isinstance(shape, Sequence) and all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0
        for size in shape
    )
    if not whole:
        raise ConfigError(
            f"The shape of `{name}` must hold whole numbers of at least 0, but is {shape!r}."
        )
    return tuple(int(size) for size in shape)


def _read_dtype(name: str, dtype: Any) -> torch.dtype | None:  # Any: whatever the user wrote
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype):
        found: torch.dtype = getattr(torch, dtype)
        return found
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise ConfigError(
            f"The dtype of `{name}` must be a `torch.dtype` or NumPy's, but is {dtype!r}."
        ) from error


def _check_layout(name: str, layout: Any, num_dims: int) -> None:  # Any: whatever the user wrote
    if layout is None:
        return
    if not isinstance(layout, str) or len(layout) != num_dims or layout.count("N") > 1:
        raise ConfigError(
            f"The layout of `{name}` must have one letter for each of {num_dims} dims, N at most "
            f"once, but is {layout!r}."
        )
