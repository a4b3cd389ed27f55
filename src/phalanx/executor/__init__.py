"""Groups of devices with named inputs, exact metrics over their slices, and monitors."""

from phalanx.executor.data import DataBatch, DataDesc
from phalanx.executor.group import DataParallelExecutorGroup
from phalanx.executor.loop import Epoch
from phalanx.executor.metrics import Collected, GroupMetrics, ReplicaMetrics
from phalanx.executor.monitor import Monitor
from phalanx.executor.records import NonFinite, Record

__all__ = [
    "Collected",
    "DataBatch",
    "DataDesc",
    "DataParallelExecutorGroup",
    "Epoch",
    "GroupMetrics",
    "Monitor",
    "NonFinite",
    "Record",
    "ReplicaMetrics",
]
