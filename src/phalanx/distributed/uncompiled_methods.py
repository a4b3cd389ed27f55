"""Keeps ``torch.compile`` out of the methods of a group and of its works.

Compiled code that calls a collective has the compiler look into the Python that it reaches. Ours
waits for other processes and keeps state on the group: nothing of it can be part of a graph.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from phalanx.torch_internals import uncompiled

__all__ = ["public_methods", "uncompiled_methods"]

AnyClass = TypeVar("AnyClass", bound=type)

_CALLED_BY_TORCH = ("_allgather_base", "_reduce_scatter_base")


def public_methods(cls: type) -> dict[str, FunctionType]:
    """Return the methods of ``cls`` itself that others call."""
    return {
        name: method
        for name, method in vars(cls).items()
        if isinstance(method, FunctionType)
        and (not name.startswith("_") or name in _CALLED_BY_TORCH)
    }


def uncompiled_methods(cls: AnyClass) -> AnyClass:
    """Have the public methods of ``cls`` run outside of any compiled code."""
    for name, method in public_methods(cls).items():
        setattr(cls, name, uncompiled(method))
    return cls
