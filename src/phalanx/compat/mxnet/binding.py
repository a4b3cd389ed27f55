"""The tensors that a group is bound to, batches of them, and how these are read and cut.

Shape legend: B rows of the batch, padded ones included; a tensor with a batch axis has B along it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.plan import Layout, Rows, check_argument, read_count
from phalanx.types import Nested


@dataclass(frozen=True)
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


@dataclass(eq=False)
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


@dataclass(frozen=True)
class BoundBatch:
    """One batch as tensors by name: ``rows`` rows, without ``pad`` padded ones.

    Attributes:
        data: Leaves of the graph where their gradients are computed.
    """

    data: dict[str, Tensor]
    labels: dict[str, Tensor]
    rows: int
    pad: int


class Binding:
    """Descriptions of the inputs, and which of them the module's forward takes."""

    # Any, here and below: descriptions and batches in any of their forms.
    def __init__(self, module: nn.Module, data: Any, labels: Any) -> None:
        self.data = read_descs(data, "data_shapes")
        self.labels = read_descs(labels, "label_shapes")
        self._arguments = frozenset(inspect.signature(module.forward).parameters)

    @property
    def batch_size(self) -> int:
        """B of the data as described; 1 where no tensor has a batch axis."""
        sized = [each for each in self.data if each.batch_axis is not None]
        return sized[0].shape[sized[0].batch_axis or 0] if sized else 1

    @property
    def batch_axis(self) -> int:
        """The batch axis of the data: of the first tensor that has one."""
        return next((each.batch_axis for each in self.data if each.batch_axis is not None), 0)

    def read(self, batch: Any, *, needs_grad: bool) -> BoundBatch:
        """Read one batch.

        Args:
            needs_grad: Whether the data become leaves that get gradients.

        Raises:
            ConfigError: Names, number of dims or rows do not fit.
        """
        batch = batch if isinstance(batch, DataBatch) else DataBatch(batch)
        data = _read_tensors(batch.data, self.data, "data")
        has_labels = self.labels and batch.label is not None
        labels = _read_tensors(batch.label, self.labels, "labels") if has_labels else {}
        both = Rows({**data, **labels}, self._layout([*data, *labels]))
        given_rows = self.batch_size if both.first is None else both.count()
        pad = read_count("pad", batch.pad or 0, 0)
        check_argument(pad <= given_rows, "pad", f"be at most the batch's {given_rows} rows", pad)
        rows = given_rows - pad
        kept: Any = both.cut([rows, pad])[0] if pad else {**data, **labels}
        own, targets = ({name: kept[name] for name in names} for names in (data, labels))
        if needs_grad:
            for leaf in own.values():
                leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        return BoundBatch(own, targets, rows, pad)

    def read_labels(self, given: Any, rows: int, pad: int) -> dict[str, Tensor]:
        """Read labels of a batch alone."""
        labels = _read_tensors(given, self.labels, "labels")
        found = Rows(labels, self._layout(labels))
        if found.first is None:
            return labels
        count = found.count()
        check_argument(count == rows + pad, "labels", f"have the batch's {rows + pad} rows", count)
        kept: dict[str, Tensor] = found.cut([rows, pad])[0]
        return kept

    def calls(self, batch: BoundBatch, sizes: Sequence[int]) -> list[Nested]:
        """Return the arguments of the module's forward for parts of ``sizes`` rows."""
        labels = {name: each for name, each in batch.labels.items() if name in self._arguments}
        taken = batch.data | labels
        return Rows(taken, self._layout(taken)).cut(sizes) if taken else [{}] * len(sizes)

    def _layout(self, names: Sequence[str] | Mapping[str, Tensor]) -> Layout:
        descs = (*self.data, *self.labels)
        return Layout(dims={each.name: each.batch_axis for each in descs if each.name in names})


def _read_tensors(given: Nested, descs: Sequence[DataDesc], noun: str) -> dict[str, Tensor]:
    """Return tensors by name, in the order of ``descs`` and with their dtypes, without a graph.

    Args:
        given: By name; or in the order of ``descs``; or the one tensor or array.
    """
    names = [each.name for each in descs]
    if not isinstance(given, Mapping):
        values = list(given) if isinstance(given, (tuple, list)) else [given]
        if len(values) != len(names):
            raise ConfigError(f"`{noun}` must hold {names} as bound, but holds {len(values)}.")
        given = dict(zip(names, values, strict=True))
    if set(given) != set(names):
        raise ConfigError(f"`{noun}` must hold {names} as bound, but holds {list(given)}.")
    return {each.name: _read_tensor(given[each.name], each) for each in descs}


def _read_tensor(value: Any, desc: DataDesc) -> Tensor:
    try:
        tensor = torch.as_tensor(value, dtype=desc.dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"`{desc.name}` must be a tensor or an array, but is {value!r:.80}."
        ) from error
    if tensor.dim() != len(desc.shape):
        raise ConfigError(
            f"`{desc.name}` must have {len(desc.shape)} dims like {desc.shape}, as bound, but has "
            f"shape {tuple(tensor.shape)}. Call `reshape` to bind it to another."
        )
    return tensor
