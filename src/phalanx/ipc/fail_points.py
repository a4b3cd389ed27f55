"""Named points that a process passes, where the chaos tests stop it.

Nothing happens there unless a fault was injected before.
"""

from __future__ import annotations

from collections.abc import Callable

Fault = Callable[[str, int], None]  # (point, worker)

fault: Fault | None = None
"""The one injected into this process, set by :func:`inject`."""
_worker = -1


def inject(new: Fault | None, worker: int = -1) -> None:
    """Make :func:`fail_point` call ``new``; worker processes born later get it too."""
    global fault, _worker
    fault, _worker = new, worker


def fail_point(point: str) -> None:
    """Pass ``point``, where a fault may strike."""
    if fault is not None:
        fault(point, _worker)
