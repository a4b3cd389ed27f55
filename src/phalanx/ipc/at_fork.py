"""What a forked child must let go of.

A fork copies file descriptors, and with them the locks that hang on the open file: were they kept,
a lock would outlive its owner's death as long as any forked child (a DataLoader's worker, say)
lives, and parent and child would not exclude each other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

__all__ = ["register_at_fork"]

_hooks: set[weakref.WeakMethod[Callable[[], None]]] = set()


def register_at_fork(hook: Callable[[], None]) -> None:
    """Have ``hook`` called in every process that is forked from this one, while its object lives.

    Args:
        hook: A method that lets go in the child, and leaves the parent's side alone.
    """
    _hooks.add(weakref.WeakMethod(hook, _hooks.discard))


def _call_hooks() -> None:
    for reference in list(_hooks):
        hook = reference()
        if hook is not None:
            hook()
    _hooks.clear()


os.register_at_fork(after_in_child=_call_hooks)
