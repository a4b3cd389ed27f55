"""Bugs that are planted in the backend `phalanx`, to see that somebody notices.

Each is a function that breaks this process's groups, by name in :data:`BUGS`; the process is not
needed for anything else afterwards. What a bug leaves out, its docstring says. Those of the
protocol are planted in C: see native_bugs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.distributed.network import ErrorStore
from phalanx.distributed.shared_memory import SharedMemory
from phalanx.distributed.status_pages import StatusPages

Patch = Callable[[Any, str, Any], None]  # as `setattr`, or pytest's


def deaths_unseen(patch: Patch) -> None:
    """Nobody looks whether a rank lives."""
    patch(StatusPages, "alive", lambda self, rank: True)


def deaths_not_told(patch: Patch) -> None:
    """Who has found a rank gone does not tell the others."""
    patch(StatusPages, "stop", lambda self, error: None)
    patch(ErrorStore, "write", lambda self, error: None)


def memory_kept(patch: Patch) -> None:
    """A group that is destroyed leaves its memory mapped."""
    patch(SharedMemory, "close", lambda self: None)


BUGS: dict[str, Callable[[Patch], None]] = {
    bug.__name__: bug for bug in (deaths_unseen, deaths_not_told, memory_kept)
}
