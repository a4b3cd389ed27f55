"""Groups of devices with named inputs, exact metrics over their slices, and monitors."""

from __future__ import annotations

import typing

from phalanx.executor_group.batches import DataBatch, DataDesc
from phalanx.executor_group.group import DataParallelExecutorGroup
from phalanx.executor_group.monitor import Monitor, Record
from phalanx.metrics import ReplicaMetrics

if typing.TYPE_CHECKING:
    from phalanx.metrics import Collected, GroupMetrics

__all__ = [
    "Collected",
    "DataBatch",
    "DataDesc",
    "DataParallelExecutorGroup",
    "GroupMetrics",
    "Monitor",
    "Record",
    "ReplicaMetrics",
]


def __getattr__(name: str) -> object:
    """Import what needs torchmetrics when it is asked for; see ``metrics.replica_metrics``."""
    if name in ("Collected", "GroupMetrics"):
        from phalanx.metrics import group_metrics  # slow to import

        return getattr(group_metrics, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
