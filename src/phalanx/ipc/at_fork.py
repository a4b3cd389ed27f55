"""What a forked child must let go of.

A fork copies file descriptors, and with them the locks that hang on the open file: were they kept,
a lock would outlive its holder's death as long as any forked child (a DataLoader's worker, say)
lives, and parent and child would not exclude each other.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forgetting", "forget_in_child"]


class Forgetting(Protocol):
    """Something that belongs to the process that made it."""

    def forget(self) -> None:
        """Let go of it in a forked child, without a word to the parent's side."""


_living: weakref.WeakSet[Forgetting] = weakref.WeakSet()


def forget_in_child(what: Forgetting) -> None:
    """Have ``what.forget()`` called in every process that is forked from this one."""
    _living.add(what)


def _forget_all() -> None:
    for what in list(_living):
        what.forget()
    _living.clear()


os.register_at_fork(after_in_child=_forget_all)
