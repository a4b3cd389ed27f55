"""Named points that a process passes, where the chaos tests stop it.

Nothing happens there unless a fault was planted before.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Fault", "plant", "planted", "reach"]

Fault = Callable[[str, int], None]  # (point, worker)

_planted: Fault | None = None
_worker = -1


def plant(fault: Fault | None, worker: int = -1) -> None:
    """Make :func:`reach` call ``fault``; worker processes born later get it too."""
    global _planted, _worker
    _planted, _worker = fault, worker


def planted() -> Fault | None:
    """Return what was planted in this process."""
    return _planted


def reach(point: str) -> None:
    """Pass ``point``."""
    if _planted is not None:
        _planted(point, _worker)
