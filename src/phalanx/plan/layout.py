"""Which leaves of a nested input are split, along which dim, and how outputs come together again.

Shape legend: B rows of the batch; a leaf that is split has B along its dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from phalanx.errors import ConfigError
from phalanx.types import Nested

__all__ = ["Layout", "cut", "flatten", "join", "num_rows", "unflatten"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Along which dim each input leaf is split.

    Args:
        dim: The dim for all leaves that ``dims`` does not name.
        dims: Exceptions by leaf path as errors print it (``"mask"``, ``"0"``, ``"items.1"``); None
            gives the leaf whole to every replica.

    Tensors without dims and values that are not tensors are always given whole.

    Example:
        >>> layout = Layout(dims={"mask": None})
        >>> parts = cut({"x": torch.arange(3), "mask": torch.ones(2)}, [2, 1], layout)
        >>> parts[1]["x"].tolist(), parts[1]["mask"].tolist()
        ([2], [1.0, 1.0])
    """

    dim: int = 0
    dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def dims_of(self, batch: Nested) -> list[int | None]:
        """Return for every leaf, in the order of :func:`flatten`, along which dim it is split.

        None stands for a leaf that is given whole.

        Raises:
            ConfigError: A leaf has not the dim that it is to be split along.
        """
        leaves, _ = flatten(batch)
        paths = _paths(batch) if self.dims else [""] * len(leaves)
        dims = [self._dim_of(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        for place, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
            if dim is not None and not -leaf.dim() <= dim < leaf.dim():
                path = _named(_paths(batch)[place])
                raise ConfigError(
                    f"Input {path} must have a dim {dim} to be split along, but has "
                    f"shape {tuple(leaf.shape)}. Give its path with None in the layout to hand it "
                    "over whole."
                )
        return dims

    def _dim_of(self, path: str, leaf: object) -> int | None:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return None
        return self.dims.get(path, self.dim) if self.dims else self.dim


def num_rows(batch: Nested, layout: Layout) -> int:
    """Return B, the number of rows that all split leaves of ``batch`` share.

    Raises:
        ConfigError: Two leaves differ (both are named), or no leaf is split.
    """
    leaves, _ = flatten(batch)
    split = [
        (place, dim, leaves[place].shape[dim])
        for place, dim in enumerate(layout.dims_of(batch))
        if dim is not None
    ]
    if not split:
        raise ConfigError(
            "`batch` must hold at least one tensor that is split over replicas, but holds none. "
            "Give a tensor with a batch dim."
        )
    first, _, expected = split[0]
    for place, dim, rows in split[1:]:
        if rows != expected:
            paths = _paths(batch)
            raise ConfigError(
                f"Input {_named(paths[place])} must have {expected} rows along dim {dim} like "
                f"{_named(paths[first])}, but has {rows}. Give leaves that are not per sample "
                "whole, by None in the layout."
            )
    return int(expected)


def cut(batch: Nested, sizes: Sequence[int], layout: Layout) -> list[Nested]:
    """Cut ``batch`` into consecutive parts of ``sizes`` rows; split leaves are views."""
    leaves, spec = flatten(batch)
    columns: list[Sequence[Any]] = [
        [leaf] * len(sizes) if dim is None else leaf.split(list(sizes), dim)
        for leaf, dim in zip(leaves, layout.dims_of(batch), strict=True)
    ]
    return [unflatten([column[part] for column in columns], spec) for part in range(len(sizes))]


def join(parts: Sequence[Nested], sizes: Sequence[int], dim: int = 0) -> Nested:
    """Merge the replicas' outputs leaf by leaf.

    Tensors are concatenated along ``dim``; tensors without dims (a loss per replica) are stacked to
    a vector of the parts; other values are taken from the first part.

    Raises:
        ConfigError: The parts differ in structure, or a tensor has not its part's rows along
        ``dim``.
    """
    flat = [flatten(part) for part in parts]
    spec = flat[0][1]
    for _, other in flat[1:]:
        if other != spec:
            raise ConfigError(
                f"`module` must return the same structure from every replica, but returned {spec} "
                f"and {other}."
            )
    columns = [list(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    for place, column in enumerate(columns):
        for leaf, rows in zip(column, sizes, strict=True):
            if not _has_rows(leaf, rows, dim):
                path = _named(_paths(parts[0])[place])
                raise ConfigError(
                    f"Output {path} of `module` must have its slice's {rows} rows along dim {dim}, "
                    f"but has shape {tuple(leaf.shape)}. Return one row per sample, or a scalar "
                    "per replica."
                )
    return unflatten([_join_column(column, dim) for column in columns], spec)


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


def _has_rows(leaf: object, rows: int, dim: int) -> bool:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return True
    return dim < leaf.dim() and leaf.shape[dim] == rows


def _join_column(column: list[Any], dim: int) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.stack(column) if column[0].dim() == 0 else torch.cat(column, dim)


def _paths(value: Nested) -> list[str]:
    flatten(value)  # so that dataclasses are known
    with_paths, _ = pytree.tree_flatten_with_path(value)
    return [".".join(_key(key) for key in path) for path, _ in with_paths]


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _named(path: str) -> str:
    return f"`{path}`" if path else "tensor"
