"""Objects that a forked child must let go of.

A fork copies file descriptors, and with them the locks that hang on the open file: were they kept,
a lock would outlive its owner's death as long as any forked child (a DataLoader's worker, say)
lives, and parent and child would not exclude each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

# Any: objects of any class, each with its method. (A `WeakMethod` whose object dies as the
# interpreter ends may complain on stderr.)
_hooks: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def register_at_fork(hook: Callable[[], None]) -> None:
    """Have ``hook`` called in every process that is forked from this one, while its object lives.

    Args:
        hook: A method that lets go in the child, and leaves the parent's side alone; one of each
            object.
    """
    method = cast(MethodType, hook)
    _hooks[method.__self__] = method.__func__


def _call_hooks() -> None:
    hooks = list(_hooks.items())
    _hooks.clear()  # before the calls: a hook may register anew, for the child's own forks
    for owner, hook in hooks:
        hook(owner)


os.register_at_fork(after_in_child=_call_hooks)
