"""Named points that a worker process passes, where the chaos tests stop it.

Nothing happens there unless a fault was planted before the worker was born.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["POINTS", "plant", "planted", "reach"]

POINTS = (
    "born",  # it has all it needs, and has not said so yet
    "microbatch taken",
    "before forward",
    "after backward",
    "gradients half written",
    "gradients written",
    "before reply",
    "slice taken",
    "block saved",  # the undo record of a block of the optimizer's step is complete
    "block stepped",  # the block is new, and does not count as done yet
    "block done",
    "slice done",
)
"""All points, in the order of a step. Inside forward and backward it is the module that stops."""

Fault = Callable[[str, int], None]  # (point, worker)

_planted: Fault | None = None
_worker = -1


def plant(fault: Fault | None, worker: int = -1) -> None:
    """Make :func:`reach` call ``fault``; workers born later get it too."""
    global _planted, _worker
    _planted, _worker = fault, worker


def planted() -> Fault | None:
    """Return what was planted in this process."""
    return _planted


def reach(point: str) -> None:
    """Pass ``point``."""
    if _planted is not None:
        _planted(point, _worker)
