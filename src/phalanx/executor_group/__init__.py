"""Groups of devices with named inputs, and monitors."""

from __future__ import annotations

from phalanx.executor_group.batches import DataBatch, DataDesc
from phalanx.executor_group.group import DataParallelExecutorGroup
from phalanx.executor_group.monitor import Monitor, Record

__all__ = [
    "DataBatch",
    "DataDesc",
    "DataParallelExecutorGroup",
    "Monitor",
    "Record",
]
