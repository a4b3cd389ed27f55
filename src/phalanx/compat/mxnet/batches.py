"""Descriptions of the tensors of a group, and batches of them.

Shape legend: B rows of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from phalanx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DataDesc:
    """A tensor that goes in or comes out, by name.

    Args:
        name: The argument of the module's forward; for outputs, any.
        shape: For the whole batch.
        dtype: Batches are converted to it; a `torch.dtype`, or NumPy's or its name. None: as they
            come.
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
        object.__setattr__(self, "shape", _read_shape(self.name, self.shape))
        object.__setattr__(self, "dtype", _read_dtype(self.dtype))
        layout, dims = self.layout, len(self.shape)
        if layout is not None and (len(layout) != dims or layout.count("N") > 1):
            raise ConfigError(
                f"The layout of `{self.name}` must have one letter for each of {dims} dims, N at "
                f"most once, but is {layout!r}."
            )

    @property
    def batch_axis(self) -> int | None:
        """The dim of N, or None for what is given whole."""
        if self.layout is None:
            return 0 if self.shape else None
        return self.layout.find("N") if "N" in self.layout else None


@dataclasses.dataclass(eq=False)
class DataBatch:
    """One batch: inputs, and what belongs to them.

    Args:
        data: By name, or a tuple or list in the order of the bound names, or the one input; tensors
            or NumPy arrays.
        label: Likewise; None where there are none.
        pad: How many of the last rows only fill the batch up. They count nowhere: not in outputs,
            gradients, statistics or metrics.

    Example:
        >>> DataBatch([torch.ones(4, 2)], [torch.tensor([0, 1, 1, 0])], pad=1).pad
        1
    """

    data: Any  # tensors in any of their forms, as labels
    label: Any = None
    pad: int | None = None


# Any, here and below: whatever the user wrote.
def read_descs(given: Any, noun: str) -> tuple[DataDesc, ...]:
    """Read the descriptions of ``noun``: a sequence of `DataDesc`s or (name, shape, …), or None.

    Raises:
        ConfigError: Two have one name.
    """
    descs = [each if isinstance(each, DataDesc) else DataDesc(*each) for each in given or ()]
    names = [each.name for each in descs]
    if len(set(names)) < len(names):
        raise ConfigError(f"`{noun}` must name each tensor once, but names {names}.")
    return tuple(descs)


def _read_shape(name: str, shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Sequence) else (None,)
    if not all(isinstance(size, Integral) and int(size) >= 0 for size in sizes):
        raise ConfigError(
            f"The shape of `{name}` must hold whole numbers of at least 0, but is {shape!r}."
        )
    return tuple(int(size) for size in sizes)


def _read_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return torch.from_numpy(np.empty(0, dtype)).dtype
