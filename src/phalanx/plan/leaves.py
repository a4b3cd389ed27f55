"""The leaves of nested values, and their paths."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.torch_internals import pytree
from phalanx.types import Nested

# Classes that torch's pytree was taught here, by whichever thread met them first.
_taught: set[type] = set()
_teaching = threading.Lock()

_ONE_LEAF = pytree.tree_flatten(0)[1]


def flatten(
    value: Nested, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of ``value`` and the structure that puts them back.

    Torch's pytree is taught dataclasses, and mappings of any class (`BatchEncoding`, `UserDict`),
    when it first meets them. Parts are made as ``kind(**fields)`` and ``kind(mapping)``.

    Args:
        is_leaf: A test of a node; a list or tuple of tensors with dims is none. Torch keeps it
            until the cyclic collector runs, so it must hold no tensors.
    """
    # A tensor, and a pair of tensors, are most of what is flattened; torch's own way takes longer.
    if isinstance(value, Tensor):
        return [value], _ONE_LEAF
    kind = type(value)
    if (kind is tuple or kind is list) and value:
        for each in value:
            if not isinstance(each, Tensor) or not each.ndim:
                break
        else:
            return list(value), _spec_of(list if kind is list else tuple, len(value))
    leaves, spec = pytree.tree_flatten(value, is_leaf)
    kinds = {type(leaf) for leaf in leaves}
    strange = [k for k in kinds if dataclasses.is_dataclass(k) or issubclass(k, Mapping)]
    for kind in strange:
        _teach(kind)
    return flatten(value, is_leaf) if strange else (leaves, spec)


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Nested:
    """Put ``leaves`` back into the structure that :func:`flatten` returned."""
    if spec is _ONE_LEAF and len(leaves) == 1:
        return leaves[0]
    if spec is _spec_of(tuple, len(leaves)):
        return tuple(leaves)
    return pytree.tree_unflatten(list(leaves), spec)


def copy_rows(rows: Nested, device: torch.device, *, may_need_grad: bool = True) -> Nested:
    """Return copies of all tensors, on ``device``, and of all arrays; without their graph.

    Every microbatch of every executor is such a copy: a module may write to its inputs, and kernels
    may choose by alignment. A tensor that is there twice is one tensor in the copy, too.

    Raises:
        ConfigError: A tensor requires a gradient, and ``may_need_grad`` is False.

    Example:
        >>> import torch
        >>> x = torch.ones(3)
        >>> copy = copy_rows({"a": x, "b": x}, torch.device("cpu"))
        >>> copy["a"] is copy["b"], copy["a"] is x
        (True, False)
    """
    leaves, spec = flatten(rows)
    waits = device.type == "cpu"  # the host reads at once what is there
    copies: dict[int, Any] = {}  # Any: whatever a batch holds
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad and not may_need_grad:
                raise ConfigError(
                    "A batch must hold no tensor that requires a gradient, but does. Detach it, or "
                    "use `DataParallel` to train what stands before the module."
                )
            own = leaf.detach() if leaf.requires_grad else leaf
            copies[id(leaf)] = own.to(device, copy=True, non_blocking=not waits)
        else:
            copies[id(leaf)] = leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    return unflatten([copies[id(leaf)] for leaf in leaves], spec)


def leaf_paths(value: Nested, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the name of every leaf, in the order of :func:`flatten`, as errors print them."""
    if isinstance(value, Tensor):
        return [""]
    flatten(value, is_leaf)  # so that dataclasses are known
    with_paths, _ = pytree.tree_flatten_with_path(value, is_leaf)
    return [".".join(_key(key) for key in path) for path, _ in with_paths]


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


def named(path: str) -> str:
    """Return a leaf's path as errors print it; an input that is one tensor has none."""
    return f"`{path}`" if path else "tensor"


@functools.cache
def _spec_of(kind: type[list[int]] | type[tuple[int, ...]], length: int) -> pytree.TreeSpec:
    return pytree.tree_flatten(kind([0] * length))[1]


# Any: an object of the user's own.
def _teach(kind: type[Any]) -> None:
    """Teach torch's pytree a class, once, whichever thread meets it first."""
    make = (lambda fields: kind(**fields)) if dataclasses.is_dataclass(kind) else kind
    with _teaching:
        if kind not in _taught:
            pytree.register_pytree_node(
                kind,
                lambda value: (list(_fields(value).values()), list(_fields(value))),
                lambda values, names: make(dict(zip(names, values, strict=True))),
                flatten_with_keys_fn=lambda value: (
                    [(pytree.MappingKey(name), each) for name, each in _fields(value).items()],
                    list(_fields(value)),
                ),
            )
            _taught.add(kind)


def _fields(value: Any) -> dict[Any, Any]:
    """Return the fields that a dataclass is made of, or the items of a mapping."""
    if not dataclasses.is_dataclass(value):
        return dict(value)
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
