"""How a batch is cut: which of its leaves are split along which dim, and how many rows it has.

    tensors, arrays       split along the layout's dim
    what a path names     split along its own dim (lists: by their items), or whole, by None
    anything else         given whole
    Layout(split=…)       the user's functions make samples of a batch, and batches of samples

Shape legend: B rows of the batch; a leaf that is split has B along its dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan.leaves import covering, covers, flatten, leaf_paths, named, unflatten
from phalanx.types import Nested

__all__ = ["Layout", "Rows", "cut", "open_rows"]

_ARRAYS = (Tensor, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Along which dim each leaf of a batch is split.

    Args:
        dim: The dim for all tensors and arrays that ``dims`` does not name.
        dims: Exceptions by leaf path as errors print it (``"mask"``, ``"0"``, ``"items.1"``), or by
            position (``0``); None gives the leaf whole to every replica. A path covers all tensors
            and arrays below it, and yields to a longer one. A path that names a list or tuple
            without tensors splits it by its items, whatever its dim.
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
        >>> parts = cut(batch, [2, 1], layout)
        >>> parts[1]["x"].tolist(), parts[1]["mask"].tolist(), parts[1]["names"]
        ([2], [1.0, 1.0], ['c'])
    """

    dim: int = 0
    dims: Mapping[str | int, int | None] = dataclasses.field(default_factory=dict)
    split: Callable[[Nested], Sequence[Any]] | None = None
    collate: Callable[[list[Any]], Nested] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", {str(path): dim for path, dim in self.dims.items()})
        if self.split is None and self.collate is None:
            return
        if self.split is None or self.collate is None or self.dims:
            raise ConfigError(
                "`split` and `collate` must be given together and without `dims`, but one of them "
                "is missing or there are dims."
            )

    def chosen(self, paths: Sequence[str]) -> list[int | None]:
        """Return the dim of each of ``paths``."""
        found = [covering(path, self.dims) for path in paths]
        return [self.dim if path is None else self.dims[path] for path in found]


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
        self._lists = _named_lists(batch, layout) if layout.dims else frozenset()
        lists = self._lists  # torch keeps the test longer than a batch lives: it holds ids alone
        self._is_leaf = (lambda node: id(node) in lists) if lists else None
        self._leaves, self._spec = flatten(batch, self._is_leaf)
        dims: list[int | None] = [layout.dim] * len(self._leaves)
        if layout.dims:
            dims = layout.chosen(self._paths())
        self.dims: list[int | None] = []
        self._rows: dict[int, int] = {}  # of the leaves that are split, by their places
        for place, (leaf, dim) in enumerate(zip(self._leaves, dims, strict=True)):
            is_array = isinstance(leaf, _ARRAYS)
            if dim is None or not (leaf.ndim if is_array else id(leaf) in lists):
                self.dims.append(None)
                continue
            if is_array and not -leaf.ndim <= dim < leaf.ndim:
                raise ConfigError(
                    f"Input {self._named(place)} must have a dim {dim} to be split along, but has "
                    f"shape {tuple(leaf.shape)}. Give its path with None in the layout to hand it "
                    "over whole."
                )
            self.dims.append(dim)
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
                raise ConfigError(
                    f"Input {self._named(place)} must have {rows} rows along dim "
                    f"{self.dims[place]} like {self._named(first)}, but has "
                    f"{count}. Give leaves that are not per sample whole, by None in "
                    "the layout, or say by Layout(split=..., collate=...) what the samples are."
                )
        if rows > 1 and not all(isinstance(leaf, _ARRAYS) for leaf in self._leaves):
            self._refuse_unnamed_lists(rows)
        return rows

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` rows; tensors and arrays are views."""
        columns: list[Sequence[Any]] = []
        for leaf, dim in zip(self._leaves, self.dims, strict=True):
            if dim is None:
                columns.append([leaf] * len(sizes))
            elif isinstance(leaf, Tensor):
                columns.append(leaf.split_with_sizes(list(sizes), dim))  # as `split` in the end
            else:
                columns.append(_cut_leaf(leaf, sizes, dim))
        parts = range(len(sizes))
        return [unflatten([column[part] for column in columns], self._spec) for part in parts]

    def _paths(self) -> list[str]:
        return leaf_paths(self._batch, self._is_leaf)

    def _named(self, place: int) -> str:
        return named(self._paths()[place])

    def _refuse_unnamed_lists(self, rows: int) -> None:
        """Refuse lists with an item for each row: whole, they would meet other replicas' rows."""
        is_column = _test_of_columns(rows, self._lists)
        leaves, _ = flatten(self._batch, is_column)
        if not any(map(is_column, leaves)):
            return
        for path, leaf in zip(leaf_paths(self._batch, is_column), leaves, strict=True):
            if is_column(leaf) and covering(path, self._layout.dims) is None:
                raise ConfigError(
                    f"Input {named(path)} has an item for each of the {rows} rows, but the layout "
                    f"does not name it. Give Layout(dims={{{path!r}: 0}}) to split it by its "
                    "items, or None instead of 0 to hand it over whole."
                )


class _Samples:
    """A batch that the user's own functions take apart and put together; see :class:`Layout`.

    Raises:
        ConfigError: ``split`` returns no list.
    """

    def __init__(self, batch: Nested, layout: Layout) -> None:
        assert layout.split is not None
        assert layout.collate is not None
        self._batch = batch
        self._collate = layout.collate
        found: Any = layout.split(batch)  # Any: whatever the user's function returns
        if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping)):
            raise ConfigError(
                f"`split` must return a list of samples, but returned {type(found).__name__!r}."
            )
        self._samples = list(found)

    @property
    def first(self) -> int | None:
        """The number of samples."""
        return len(self._samples)

    def count(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` samples; None for one without any."""
        if not self._samples:
            return [self._batch] * len(sizes)
        parts = _cut_leaf(self._samples, sizes, 0)
        return [self._collate(list(part)) if part else None for part in parts]


def open_rows(batch: Nested, layout: Layout) -> Rows | _Samples:
    """Return ``batch`` laid out, to be measured and cut."""
    return Rows(batch, layout) if layout.split is None else _Samples(batch, layout)


def cut(batch: Nested, sizes: Sequence[int], layout: Layout) -> list[Nested]:
    """Return what :meth:`Rows.cut` does."""
    return open_rows(batch, layout).cut(sizes)


# Any, from here on: the user's own inputs, and what they hold.
def _named_lists(batch: Any, layout: Layout) -> frozenset[int]:
    """Return the ids of the lists that the layout names to be split, by their items.

    Raises:
        ConfigError: A path names nothing.
    """
    found = [(path, dim, _at(batch, str(path))) for path, dim in layout.dims.items()]
    missing = [str(path) for path, _, value in found if value is _MISSING]
    if missing:
        paths = leaf_paths(batch)
        for path in missing:
            if not any(covers(path, each) for each in paths):
                raise ConfigError(
                    f"`layout` must name leaves of the input, but names {path!r}. The input has "
                    f"{', '.join(map(repr, paths)) or 'none'}."
                )
    return frozenset(
        id(value)
        for _, dim, value in found
        if dim is not None and type(value) in (list, tuple) and _holds_no_arrays(value)
    )


_MISSING = object()


def _at(value: Any, path: str) -> Any:
    """Return what ``path`` leads to in ``value``, or _MISSING."""
    for key in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = next((each for name, each in value.items() if str(name) == key), _MISSING)
        elif isinstance(value, (list, tuple)) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, tuple) or dataclasses.is_dataclass(value):
            value = getattr(value, key, _MISSING)
        else:
            return _MISSING
    return value


def _holds_no_arrays(value: Any) -> bool:
    return not any(isinstance(leaf, _ARRAYS) and leaf.ndim for leaf in flatten(value)[0])


# torch keeps this test longer than a batch lives, so it holds ids and numbers alone.
def _test_of_columns(rows: int, named_lists: frozenset[int]) -> Callable[[Any], bool]:
    """Return a test of a node: a list, or a tuple of texts, with an item for each of ``rows``."""

    def is_column(node: Any) -> bool:
        if type(node) not in (list, tuple) or len(node) != rows or id(node) in named_lists:
            return False
        texts = all(isinstance(each, str) for each in node)
        return texts or (type(node) is list and _holds_no_arrays(node))

    return is_column


def _cut_leaf(leaf: Any, sizes: Sequence[int], dim: int) -> Sequence[Any]:
    stops = [0, *accumulate(sizes)]
    if isinstance(leaf, np.ndarray):
        return list(np.split(leaf, stops[1:-1], dim))
    return [leaf[start:stop] for start, stop in pairwise(stops)]
