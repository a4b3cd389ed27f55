"""Which leaves of a nested input are split, and along which dim.

Shape legend: B rows of the batch; a leaf that is split has B along its dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.types import Nested

__all__ = [
    "Layout",
    "Rows",
    "covering",
    "covers",
    "cut",
    "flatten",
    "leaf_paths",
    "named",
    "num_rows",
    "unflatten",
]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Along which dim each input leaf is split.

    Args:
        dim: The dim for all leaves that ``dims`` does not name.
        dims: Exceptions by leaf path as errors print it (``"mask"``, ``"0"``, ``"items.1"``), or by
            position (``0``); None gives the leaf whole to every replica. A path covers all leaves
            below it, and yields to a longer one.

    Tensors without dims and values that are not tensors are always given whole.

    Example:
        >>> import torch
        >>> layout = Layout(dims={"mask": None})
        >>> parts = cut({"x": torch.arange(3), "mask": torch.ones(2)}, [2, 1], layout)
        >>> parts[1]["x"].tolist(), parts[1]["mask"].tolist()
        ([2], [1.0, 1.0])
    """

    dim: int = 0
    dims: Mapping[str | int, int | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_words(self.dim, self.dims)
        object.__setattr__(self, "dims", {str(path): dim for path, dim in self.dims.items()})

    def dims_of(self, batch: Nested) -> list[int | None]:
        """Return for every leaf, in the order of :func:`flatten`, along which dim it is split.

        None stands for a leaf that is given whole.

        Raises:
            ConfigError: A leaf has not the dim that it is to be split along, or a path in ``dims``
                names no leaf.
        """
        return self._dims_of(batch, flatten(batch)[0])

    # Any: leaves of the user's own inputs.
    def _dims_of(self, batch: Nested, leaves: Sequence[Any]) -> list[int | None]:
        chosen = self._chosen(batch) if self.dims else [self.dim] * len(leaves)
        dims = [
            dim if isinstance(leaf, Tensor) and leaf.dim() else None
            for leaf, dim in zip(leaves, chosen, strict=True)
        ]
        for place, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
            if dim is not None and not -leaf.dim() <= dim < leaf.dim():
                path = named(leaf_paths(batch)[place])
                raise ConfigError(
                    f"Input {path} must have a dim {dim} to be split along, but has "
                    f"shape {tuple(leaf.shape)}. Give its path with None in the layout to hand it "
                    "over whole."
                )
        return dims

    def _chosen(self, batch: Nested) -> list[int | None]:
        paths = leaf_paths(batch)
        found = [covering(path, self.dims) for path in paths]
        for path in self.dims:
            known = path in found or any(covers(str(path), each) for each in paths)
            if not known and not _reaches(batch, str(path)):
                raise ConfigError(
                    f"`layout` must name leaves of the input, but names {path!r}. The input has "
                    f"{', '.join(map(repr, paths)) or 'none'}."
                )
        return [self.dim if path is None else self.dims[path] for path in found]


# Any: whatever the user wrote.
def _check_words(dim: Any, dims: Any) -> None:
    if not _is_whole(dim):
        raise ConfigError(f"`dim` must be a whole number, but is {dim!r}. Give Layout(dim=1), say.")
    if not isinstance(dims, Mapping) or not all(
        each is None or _is_whole(each) for each in dims.values()
    ):
        raise ConfigError(
            f"`dims` must say a whole number or None for each path, but is {dims!r}. Give "
            "Layout(dims={'mask': None}), say."
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Rows:
    """A batch as it is laid out, to be measured and cut.

    Raises:
        ConfigError: As :meth:`Layout.dims_of`.
        UnsupportedError: A leaf that is split is sparse or nested.
    """

    def __init__(self, batch: Nested, layout: Layout) -> None:
        self._batch = batch
        self._leaves, self._spec = flatten(batch)
        self._dims = layout._dims_of(batch, self._leaves)
        _check_dense(batch, self._leaves, self._dims)

    def count(self) -> int:
        """Return B, the number of rows that all split leaves share.

        Raises:
            ConfigError: Two leaves differ (both are named), or no leaf is split.
        """
        split = [
            (place, dim, self._leaves[place].shape[dim])
            for place, dim in enumerate(self._dims)
            if dim is not None
        ]
        if not split:
            raise ConfigError(
                "`batch` must hold at least one tensor that is split over replicas, but holds "
                "none. Give a tensor with a batch dim."
            )
        first, _, expected = split[0]
        for place, dim, rows in split[1:]:
            if rows != expected:
                paths = leaf_paths(self._batch)
                raise ConfigError(
                    f"Input {named(paths[place])} must have {expected} rows along dim {dim} like "
                    f"{named(paths[first])}, but has {rows}. Give leaves that are not per sample "
                    "whole, by None in the layout."
                )
        return int(expected)

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` rows; split leaves are views."""
        columns: list[Sequence[Any]] = [
            [leaf] * len(sizes) if dim is None else leaf.split(list(sizes), dim)
            for leaf, dim in zip(self._leaves, self._dims, strict=True)
        ]
        parts = range(len(sizes))
        return [unflatten([column[part] for column in columns], self._spec) for part in parts]


def num_rows(batch: Nested, layout: Layout) -> int:
    """Return what :meth:`Rows.count` does."""
    return Rows(batch, layout).count()


def cut(batch: Nested, sizes: Sequence[int], layout: Layout) -> list[Nested]:
    """Return what :meth:`Rows.cut` does."""
    return Rows(batch, layout).cut(sizes)


# Any: leaves of the user's own inputs.
def _check_dense(batch: Nested, leaves: Sequence[Any], dims: Sequence[int | None]) -> None:
    """Refuse to split what has no rows that lie one behind the other."""
    for place, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is not None and (leaf.is_nested or leaf.layout is not torch.strided):
            told = "nested" if leaf.is_nested else f"of layout {leaf.layout}"
            raise UnsupportedError(
                f"Input {named(leaf_paths(batch)[place])} must be dense to be split, but is "
                f"{told}. Give its path with None in the layout to hand it over whole, or make it "
                "dense."
            )


def flatten(value: Nested) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of ``value`` and the structure that puts them back.

    The fields of dataclasses are leaves too: torch's pytree is taught a class when it is first met.
    """
    leaves, spec = pytree.tree_flatten(value)
    strange = {
        type(leaf): None
        for leaf in leaves
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    }
    for kind in strange:
        pytree.register_dataclass(kind)
    return flatten(value) if strange else (leaves, spec)


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Nested:
    """Put ``leaves`` back into the structure that :func:`flatten` returned."""
    return pytree.tree_unflatten(list(leaves), spec)


def covering(path: str, known: Collection[str | int]) -> str | None:
    """Return the longest of ``known`` that is ``path`` or stands above it, or None.

    Example:
        >>> covering("items.1.x", {"items", "items.1", "x"})
        'items.1'
    """
    while path not in known:
        above, dot, _ = path.rpartition(".")
        if not dot:
            return None
        path = above
    return path


def leaf_paths(value: Nested) -> list[str]:
    """Return the name of every leaf, in the order of :func:`flatten`, as errors print them."""
    flatten(value)  # so that dataclasses are known
    with_paths, _ = pytree.tree_flatten_with_path(value)
    return [".".join(_key(key) for key in path) for path, _ in with_paths]


def covers(above: str, path: str) -> bool:
    """Tell whether ``above`` is ``path`` or stands above it."""
    return path == above or path.startswith(f"{above}.")


def _reaches(value: Nested, path: str) -> bool:
    """Tell whether ``path`` leads to something; a dataclass's field that is None is no leaf."""
    for key in path.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, (list, tuple)) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif dataclasses.is_dataclass(value) and hasattr(value, key):
            value = getattr(value, key)
        else:
            return False
    return value is None


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def named(path: str) -> str:
    """Return a leaf's path as errors print it; an input that is one tensor has none."""
    return f"`{path}`" if path else "tensor"
