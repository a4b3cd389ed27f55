"""Named inputs on unequal devices: the executor group, its metrics and its monitor."""

from phalanx.executor.metrics import Collected, GroupMetrics, ReplicaMetrics
from phalanx.executor.monitor import Monitor
from phalanx.executor.records import NonFinite, Record

__all__ = ["Collected", "GroupMetrics", "Monitor", "NonFinite", "Record", "ReplicaMetrics"]
