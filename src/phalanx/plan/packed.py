"""Nested values as tensors and what JSON can hold, for files and messages without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from phalanx.errors import UnsupportedError
from phalanx.plan.leaves import flatten, unflatten
from phalanx.torch_internals import pytree
from phalanx.types import Nested

__all__ = ["pack_nested", "unpack_nested"]


# Any, here and below: what JSON can hold.
def pack_nested(tensors: dict[str, Tensor], value: Nested) -> Any:
    """Set the tensors of ``value`` aside, by number, and return the rest.

    Raises:
        UnsupportedError: It holds something that JSON cannot hold.
    """
    leaves, structure = flatten(value)
    names: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            names.append([str(len(tensors))])
            tensors[str(len(tensors))] = leaf.detach().cpu().contiguous().clone()
        else:
            names.append(leaf)
    try:
        json.dumps(names)
        return [names, pytree.treespec_dumps(structure)]
    except (TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            "Outputs and targets must be tensors, numbers and texts in lists, tuples and dicts to "
            "be counted by metrics over ranks and to be saved in the middle of an epoch, but hold "
            f"something else: {error}."
        ) from error


def unpack_nested(tensors: Mapping[str, Tensor], packed: Any) -> Nested:
    """Return what :func:`pack_nested` was given."""
    names, structure = packed
    leaves = [tensors[each[0]] if isinstance(each, list) else each for each in names]
    return unflatten(leaves, pytree.treespec_loads(structure))
