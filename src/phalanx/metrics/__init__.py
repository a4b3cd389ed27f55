"""Metrics of whole batches, for `Trainer` and for executor groups."""

from phalanx.metrics.by_name import Metrics
from phalanx.metrics.updating import device_of, update_metric
from phalanx.metrics.whole_batches import Joining

__all__ = ["Joining", "Metrics", "device_of", "update_metric"]
