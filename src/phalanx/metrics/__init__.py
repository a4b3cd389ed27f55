"""Exact metrics over slices of a batch, for `Trainer` and for executor groups."""

from __future__ import annotations

import typing

from phalanx.metrics.device_parts import Columns, Part
from phalanx.metrics.replica_metrics import ReplicaMetrics

if typing.TYPE_CHECKING:
    from phalanx.metrics.group_metrics import Collected, GroupMetrics

__all__ = ["Collected", "Columns", "GroupMetrics", "Part", "ReplicaMetrics"]


def __getattr__(name: str) -> object:
    """Import what needs torchmetrics when it is asked for; see ``replica_metrics``."""
    if name in ("Collected", "GroupMetrics"):
        from phalanx.metrics import group_metrics  # slow to import

        return getattr(group_metrics, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
