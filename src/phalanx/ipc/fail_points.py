"""Named points that a process passes, where the chaos tests stop it.

Nothing happens there unless a fault was injected before.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Fault", "fail_point", "inject", "injected"]

Fault = Callable[[str, int], None]  # (point, worker)

_injected: Fault | None = None
_worker = -1


def inject(fault: Fault | None, worker: int = -1) -> None:
    """Make :func:`fail_point` call ``fault``; worker processes born later get it too."""
    global _injected, _worker
    _injected, _worker = fault, worker


def injected() -> Fault | None:
    """Return the fault injected into this process."""
    return _injected


def fail_point(point: str) -> None:
    """Pass ``point``, where a fault may strike."""
    if _injected is not None:
        _injected(point, _worker)
