"""The layout of a batch: the dim along which each leaf is split, and the number of rows.

    tensors, arrays       split along the layout's dim
    what a path names     split along its own dim (lists: by their items), or whole, by None
    anything else         given whole
    Layout(split=…)       the user's functions make samples of a batch, and batches of samples

Shape legend: B rows of the batch; a leaf that is split has B along its dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan.arguments import check_argument, read_whole
from phalanx.plan.leaves import covering, flatten, leaf_paths, named, unflatten
from phalanx.types import Nested

_ARRAYS = (Tensor, np.ndarray)
_SINGLE = (str, bytes, int, float, type(None))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dim along which each leaf of a batch is split.

    Args:
        dim: The dim for all tensors and arrays that ``dims`` does not name.
        dims: Exceptions by leaf path as errors print it (``"mask"``, ``"0"``, ``"items.1"``), or by
            position (``0``); None gives the leaf whole to every replica. A path covers all leaves
            below it, and yields to a longer one. A list without tensors is split by its items,
            whatever its dim.
        split: batch -> its samples, as a list, for batches that cannot be cut leaf by leaf: objects
            of other libraries, or lists of one dict of tensors per sample. Needs ``collate``.
        collate: Some of these samples -> a batch, as the ``collate_fn`` of a loader.

    Tensors and NumPy arrays with dims are split; everything else is given whole unless ``dims``
    names it. A list that ``dims`` does not name and that has an item for each row raises an error,
    as it may be meant to be split.

    Example:
        >>> import torch
        >>> layout = Layout(dims={"mask": None, "names": 0})
        >>> batch = {"x": torch.arange(3), "mask": torch.ones(2), "names": ["a", "b", "c"]}
        >>> parts = open_rows(batch, layout).cut([2, 1])
        >>> parts[1]["x"].tolist(), parts[1]["mask"].tolist(), parts[1]["names"]
        ([2], [1.0, 1.0], ['c'])
    """

    dim: int = 0
    dims: Mapping[str | int, int | None] = dataclasses.field(default_factory=dict)
    split: Callable[[Nested], Sequence[Any]] | None = None
    collate: Callable[[list[Any]], Nested] | None = None

    def __post_init__(self) -> None:
        read_whole("dim", self.dim)
        wanted = "map leaf paths to dims"
        check_argument(isinstance(self.dims, Mapping), "dims", wanted, self.dims)
        for path, dim in self.dims.items():
            read_whole(f"dims[{path!r}]", 0 if dim is None else dim)
        object.__setattr__(self, "dims", {str(path): dim for path, dim in self.dims.items()})
        if (self.split is None) != (self.collate is None) or (self.split and self.dims):
            raise ConfigError(
                "`split` and `collate` must be given together and without `dims`, but one of them "
                "is missing or there are dims."
            )

    def dim_of(self, path: str, default: int | None) -> int | None:
        """Return the dim that ``dims`` has for ``path``, or the default."""
        found = covering(path, self.dims) if self.dims else None
        return default if found is None else self.dims[found]


class Rows:
    """A batch that is cut leaf by leaf.

    Attributes:
        dims: For every leaf, along which dim it is split; None where it is given whole.

    Raises:
        ConfigError: A leaf has not the dim that it is to be split along; a path of the layout names
            nothing in the batch.
    """

    def __init__(self, batch: Nested, layout: Layout) -> None:
        self._batch = batch
        self._layout = layout
        self._leaves, self._spec = flatten(batch, _is_list)
        paths = self._paths() if layout.dims else [""] * len(self._leaves)
        for path in layout.dims:
            if all(covering(each, {path}) is None for each in paths):
                raise ConfigError(
                    f"`layout` must name leaves of the input, but names {path!r}. The input has "
                    f"{', '.join(map(repr, paths)) or 'none'}."
                )
        self.dims: list[int | None] = []
        self._rows: dict[int, int] = {}
        for place, (leaf, path) in enumerate(zip(self._leaves, paths, strict=True)):
            is_array = isinstance(leaf, _ARRAYS) and leaf.ndim > 0
            dim = layout.dim if is_array else None
            if layout.dims and (is_array or type(leaf) in (list, tuple)):
                dim = layout.dim_of(path, dim)
            self.dims.append(dim)
            if dim is None:
                continue
            if is_array and not -leaf.ndim <= dim < leaf.ndim:
                raise ConfigError(
                    f"Input {named(self._paths()[place])} must have a dim {dim} to be split "
                    f"along, but has shape {tuple(leaf.shape)}. Give its path with None in the "
                    "layout to hand it over whole."
                )
            self._rows[place] = leaf.shape[dim] if is_array else len(leaf)

    @property
    def first(self) -> int | None:
        """The rows of the first leaf that is split; None where none is."""
        return next(iter(self._rows.values()), None)

    def count(self) -> int:
        """Return B, the number of rows that all split leaves share.

        Raises:
            ConfigError: Two leaves differ (both are named); no leaf is split; a list that the
                layout does not name has B items.
        """
        if not self._rows:
            raise ConfigError(
                "`batch` must hold at least one tensor that is split over replicas, but holds "
                "none. Give a tensor with a batch dim, name a list in `Layout(dims=...)`, or say "
                "by Layout(split=..., collate=...) what its samples are."
            )
        first, rows = next(iter(self._rows.items()))
        for place, count in self._rows.items():
            if count != rows:
                path, other = (self._paths()[each] for each in (place, first))
                counted = " Inputs are counted from 0: `1` is y of a batch (x, y)."
                raise ConfigError(
                    f"Input {named(path)} must have {rows} rows along dim {self.dims[place]} like "
                    f"{named(other)}, but has {count}.{counted if path[:1].isdigit() else ''} Give "
                    f"layout=Layout(dims={{{path!r}: None}}) if it has no row for each sample, or "
                    "Layout(split=..., collate=...) if the samples lie otherwise."
                )
        if rows > 1 and len(self._rows) < len(self._leaves):
            self._refuse_unnamed_lists(rows)
        return rows

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` rows; tensors and arrays are views."""
        if len(sizes) == 1:
            return [self._batch]
        columns: list[Sequence[Any]] = []
        for leaf, dim in zip(self._leaves, self.dims, strict=True):
            if dim is None:
                columns.append([leaf] * len(sizes))
            elif isinstance(leaf, Tensor):
                columns.append(leaf.split_with_sizes(list(sizes), dim))  # as `split` in the end
            elif isinstance(leaf, np.ndarray):
                columns.append(np.split(leaf, list(accumulate(sizes))[:-1], dim))
            else:
                columns.append(_cut_list(leaf, sizes))
        parts = range(len(sizes))
        return [unflatten([column[part] for column in columns], self._spec) for part in parts]

    def _paths(self) -> list[str]:
        return leaf_paths(self._batch, _is_list)

    def _refuse_unnamed_lists(self, rows: int) -> None:
        """Refuse lists with an item for each row: whole, they would meet other replicas' rows."""
        for place, leaf in enumerate(self._leaves):
            if type(leaf) not in (list, tuple) or len(leaf) != rows or place in self._rows:
                continue
            path = self._paths()[place]
            may_be_rows = type(leaf) is list or all(isinstance(each, str) for each in leaf)
            if may_be_rows and covering(path, self._layout.dims) is None:
                raise ConfigError(
                    f"Input {named(path)} has an item for each of the {rows} rows, but the layout "
                    f"does not name it. Give Layout(dims={{{path!r}: 0}}) to split it by its "
                    "items, or None instead of 0 to hand it over whole."
                )


class _Samples:
    """A batch that the user's own functions take apart and put together; see :class:`Layout`."""

    def __init__(self, batch: Nested, layout: Layout) -> None:
        assert layout.split is not None
        assert layout.collate is not None
        self._batch = batch
        self._collate = layout.collate
        self._samples = list(layout.split(batch))

    def count(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` samples; None for one without any."""
        if not self._samples:
            return [self._batch] * len(sizes)
        parts = _cut_list(self._samples, sizes)
        return [self._collate(part) if part else None for part in parts]


def open_rows(batch: Nested, layout: Layout) -> Rows | _Samples:
    """Return ``batch`` laid out, to be measured and cut."""
    return Rows(batch, layout) if layout.split is None else _Samples(batch, layout)


def read_layout(layout: Layout | None) -> Layout:
    """Return the layout, by default one that splits dim 0 of everything."""
    layout = Layout() if layout is None else layout
    check_argument(isinstance(layout, Layout), "layout", "be a `Layout`", layout)
    return layout


# Any, from here on: the user's own inputs, and what they hold.
def _is_list(node: Any) -> bool:
    """Tell whether a node is a list without arrays, or a tuple of texts and numbers."""
    if type(node) is tuple:
        return all(isinstance(each, _SINGLE) for each in node)
    if type(node) is not list:
        return False
    return not any(isinstance(leaf, _ARRAYS) and leaf.ndim for leaf in flatten(node)[0])


def _cut_list(items: Any, sizes: Sequence[int]) -> list[Any]:
    return [items[start:stop] for start, stop in pairwise([0, *accumulate(sizes)])]
