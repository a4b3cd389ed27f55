"""The leaves of nested values, and their paths."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import UnsupportedError
from phalanx.torch_internals import pytree
from phalanx.types import Nested

__all__ = ["covering", "covers", "flatten", "leaf_paths", "named", "unflatten"]

# Classes that torch's pytree was taught here, by whichever thread met them first.
_taught: set[type] = set()
_teaching = threading.Lock()


def flatten(
    value: Nested, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of ``value`` and the structure that puts them back.

    The fields of dataclasses are leaves too, and so are the values of mappings of any class
    (`BatchEncoding`, `UserDict`, subclasses of dict): torch's pytree is taught a class when it is
    first met.

    Args:
        is_leaf: Tells of a node that it is a leaf.
    """
    # A tensor, and a pair of tensors, are most of what is flattened; torch's own way takes longer.
    if isinstance(value, Tensor):
        return [value], _ONE_LEAF
    kind = type(value)
    if kind is tuple or kind is list:
        for each in value:
            if not isinstance(each, Tensor):
                break
        else:
            if is_leaf is None or not is_leaf(value):
                return list(value), _spec_of(list if kind is list else tuple, len(value))
    with _asking(is_leaf) as asked:
        leaves, spec = pytree.tree_flatten(value, asked)
    strange = {
        kind: None
        for kind in map(type, leaves)
        if (dataclasses.is_dataclass(kind) or issubclass(kind, Mapping)) and kind not in _taught
    }
    for kind in strange:
        _teach(kind)
    return flatten(value, is_leaf) if strange else (leaves, spec)


@contextlib.contextmanager
def _asking(is_leaf: Callable[[Any], bool] | None) -> Iterator[Callable[[Any], bool] | None]:
    """Yield a predicate that asks ``is_leaf``, and holds it no longer than the body runs.

    Torch's own function refers to itself: it keeps a predicate, and the batch behind that, until
    the cyclic collector runs.
    """
    held = [] if is_leaf is None else [is_leaf]
    try:
        yield (lambda node: held[0](node)) if held else None
    finally:
        held.clear()


_ONE_LEAF = pytree.tree_flatten(0)[1]


@functools.cache
def _spec_of(kind: type[list[int]] | type[tuple[int, ...]], length: int) -> pytree.TreeSpec:
    return pytree.tree_flatten(kind([0] * length))[1]


def _teach(kind: type) -> None:
    """Teach torch's pytree a class, once, whichever thread meets it first."""
    with _teaching:
        if kind in _taught:
            return
        if dataclasses.is_dataclass(kind):
            pytree.register_pytree_node(
                kind,
                lambda value: (list(_fields(value).values()), _names(value)),
                lambda values, names: _remade(kind, values, *names),
                flatten_with_keys_fn=lambda value: (
                    [(pytree.GetAttrKey(name), each) for name, each in _fields(value).items()],
                    _names(value),
                ),
            )
        else:
            pytree.register_pytree_node(
                kind,
                lambda value: (list(value.values()), list(value)),
                lambda values, keys: _rebuilt(kind, dict(zip(keys, values, strict=True))),
                flatten_with_keys_fn=lambda value: (
                    [(pytree.MappingKey(key), each) for key, each in value.items()],
                    list(value),
                ),
            )
        _taught.add(kind)


# Any, here and below: an object of a dataclass of the user's, its class, and what it holds.
def _names(value: Any) -> list[list[str]]:
    """Return the fields that its constructor takes: those that are leaves, and those of None.

    Raises:
        UnsupportedError: Another field is not what an object made of these would have.
    """
    names = [field.name for field in dataclasses.fields(value) if field.init]
    others = [field.name for field in dataclasses.fields(value) if not field.init]
    if others:
        made = _remade(type(value), [getattr(value, name) for name in names], names, [])
        if not all(_alike(getattr(made, name), getattr(value, name)) for name in others):
            raise UnsupportedError(_not_remade(type(value)))
    leaves = [name for name in names if getattr(value, name) is not None]
    return [leaves, [name for name in names if name not in leaves]]


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _names(value)[0]}


def _remade(kind: Any, values: Iterable[Any], names: Sequence[str], nones: Sequence[str]) -> Any:
    """Return a ``kind`` of these fields, which its `__post_init__` must leave as they are."""
    fields = {**dict(zip(names, values, strict=True)), **dict.fromkeys(nones)}
    try:
        made = kind(**fields)
        same = all(_alike(getattr(made, name), value) for name, value in fields.items())
    except Exception as error:
        raise UnsupportedError(_not_remade(kind)) from error
    if not same:
        raise UnsupportedError(_not_remade(kind))
    return made


def _alike(made: Any, given: Any) -> bool:
    if made is given:
        return True
    if isinstance(given, Tensor):
        return isinstance(made, Tensor) and torch.equal(made, given)
    return bool(np.all(made == given))


def _not_remade(kind: type) -> str:
    return (
        f"A dataclass in a batch or an output must be such that {kind.__name__}(**fields) makes "
        f"one of the same fields, as every part is made so, but {kind.__name__!r} is not. Change "
        "fields in a function that makes it and not in `__post_init__` or later, or give a dict."
    )


# Any: a mapping class of the user's.
def _rebuilt(kind: Any, items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a ``kind`` that holds ``items``, made as kind(items)."""
    try:
        made: Mapping[Any, Any] = kind(items)
        same = list(made) == list(items) and all(made[key] is items[key] for key in items)
    except Exception as error:
        raise UnsupportedError(_not_rebuilt(kind)) from error
    if not same:
        raise UnsupportedError(_not_rebuilt(kind))
    return made


def _not_rebuilt(kind: type) -> str:
    return (
        f"A mapping in a batch or an output must be such that {kind.__name__}(dict) makes one of "
        f"the same items, but {kind.__name__!r} is not. Give dict(...) of it."
    )


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Nested:
    """Put ``leaves`` back into the structure that :func:`flatten` returned."""
    if spec is _ONE_LEAF and len(leaves) == 1:
        return leaves[0]
    if spec is _spec_of(tuple, len(leaves)):
        return tuple(leaves)
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


def leaf_paths(value: Nested, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the name of every leaf, in the order of :func:`flatten`, as errors print them."""
    flatten(value, is_leaf)  # so that dataclasses are known
    with _asking(is_leaf) as asked:
        with_paths, _ = pytree.tree_flatten_with_path(value, asked)
    return [".".join(_key(key) for key in path) for path, _ in with_paths]


def covers(above: str, path: str) -> bool:
    """Tell whether ``above`` is ``path`` or stands above it."""
    return path == above or path.startswith(f"{above}.")


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def named(path: str) -> str:
    """Return a leaf's path as errors print it; an input that is one tensor has none."""
    return f"`{path}`" if path else "tensor"
