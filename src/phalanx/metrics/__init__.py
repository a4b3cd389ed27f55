"""Metrics of whole batches."""

from phalanx.metrics.metrics import Metrics, as_floats, update_metric
from phalanx.metrics.whole_batches import Joining
