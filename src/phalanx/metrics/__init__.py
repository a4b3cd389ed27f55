"""Metrics of whole batches."""

from phalanx.metrics.joining import Joining
from phalanx.metrics.metrics import Metrics, as_floats, update_metric

__all__ = ["Joining", "Metrics", "as_floats", "update_metric"]
