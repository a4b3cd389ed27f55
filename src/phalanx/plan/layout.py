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
        gives
            the leaf whole to every replica.

    Tensors without dims and values that are not tensors are always given whole.

    Example:
        >>> layout = Layout(dims={"mask": None})
        >>> parts = cut({"x": torch.arange(3), "mask": torch.ones(2)}, [2, 1], layout)
        >>> parts[1]["x"].tolist(), parts[1]["mask"].tolist()
        ([2], [1.0, 1.0])
    """

    dim: int = 0
    dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def dim_of(self, path: str, leaf: object) -> int | None:
        """Return the dim along which ``leaf`` is split, or None when it is given whole."""
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return None
        dim = self.dims.get(path, self.dim)
        if dim is not None and not -leaf.dim() <= dim < leaf.dim():
            raise ConfigError(
                f"Input {_named(path)} must have a dim {dim} to be split along, but has shape "
                f"{tuple(leaf.shape)}. Give its path with None in the layout to hand it over whole."
            )
        return dim

    def dims_of(self, batch: Nested) -> list[int | None]:
        """Return :meth:`dim_of` for every leaf, in the order of :func:`flatten`."""
        return [self.dim_of(path, leaf) for path, leaf in _leaves(batch)]


def num_rows(batch: Nested, layout: Layout) -> int:
    """Return B, the number of rows that all split leaves of ``batch`` share.

    Raises:
        ConfigError: Two leaves differ (both are named), or no leaf is split.
    """
    first: tuple[str, int, int] | None = None
    for path, leaf in _leaves(batch):
        dim = layout.dim_of(path, leaf)
        if dim is None:
            continue
        rows = leaf.shape[dim]
        if first is None:
            first = (path, rows, dim)
        elif rows != first[1]:
            raise ConfigError(
                f"Input {_named(path)} must have {first[1]} rows along dim {dim} like "
                f"{_named(first[0])}, but has {rows}. Give leaves that are not per sample whole, "
                "by None in the layout."
            )
    if first is None:
        raise ConfigError(
            "`batch` must hold at least one tensor that is split over replicas, but holds none. "
            "Give a tensor with a batch dim."
        )
    return first[1]


def cut(batch: Nested, sizes: Sequence[int], layout: Layout) -> list[Nested]:
    """Cut ``batch`` into consecutive parts of ``sizes`` rows; split leaves are views."""
    leaves, spec = flatten(batch)
    paths = [path for path, _ in _leaves(batch)]
    columns: list[Sequence[Any]] = []
    for path, leaf in zip(paths, leaves, strict=True):
        dim = layout.dim_of(path, leaf)
        columns.append([leaf] * len(sizes) if dim is None else leaf.split(list(sizes), dim))
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
    paths = [path for path, _ in _leaves(parts[0])]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    merged = [
        _join_leaf(path, list(column), sizes, dim)
        for path, column in zip(paths, columns, strict=True)
    ]
    return unflatten(merged, spec)


def flatten(value: Nested) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of ``value`` and the structure that puts them back."""
    _register_dataclasses(value)
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Nested:
    """Put ``leaves`` back into the structure that :func:`flatten` returned."""
    return pytree.tree_unflatten(list(leaves), spec)


def _join_leaf(path: str, column: list[Any], sizes: Sequence[int], dim: int) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    if column[0].dim() == 0:
        return torch.stack(column)
    for leaf, rows in zip(column, sizes, strict=True):
        if dim >= leaf.dim() or leaf.shape[dim] != rows:
            raise ConfigError(
                f"Output {_named(path)} of `module` must have its slice's {rows} rows along dim "
                f"{dim}, but has shape {tuple(leaf.shape)}. Return one row per sample, or a scalar "
                "per replica."
            )
    return torch.cat(column, dim)


def _leaves(value: Nested) -> list[tuple[str, Any]]:
    _register_dataclasses(value)
    with_paths, _ = pytree.tree_flatten_with_path(value)
    return [(".".join(_key(key) for key in path), leaf) for path, leaf in with_paths]


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _named(path: str) -> str:
    return f"`{path}`" if path else "tensor"


def _register_dataclasses(value: Nested) -> None:
    """Teach torch's pytree the dataclasses in ``value``, so that their fields are leaves."""
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            pytree.register_dataclass(type(leaf))
            _register_dataclasses(leaf)
