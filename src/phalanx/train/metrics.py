"""Exact metrics over replicas: every replica counts for itself, the counts are merged."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

import torch
from torchmetrics import Metric

from phalanx.errors import ConfigError
from phalanx.types import Nested

__all__ = ["ReplicaMetrics"]


class ReplicaMetrics:
    """One copy of every metric for each replica.

    What is merged are states (counts, sums, lists), never values, so the result is the one that a
    single copy would have computed on the whole data, however it was cut.

    Args:
        metrics: By name; they serve as patterns and are not touched.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                raise ConfigError(
                    f"`metrics` must map names to `torchmetrics.Metric` objects, but {name!r} is "
                    f"{type(metric).__name__!r}."
                )
        self._patterns = dict(metrics)
        self._copies: dict[int, dict[str, Metric]] = {}
        self._shared = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def copy(self) -> ReplicaMetrics:
        """Return the same metrics with counts of their own."""
        return ReplicaMetrics(self._patterns)

    def reset(self, num_replicas: int) -> None:
        """Start counting anew."""
        first = {name: _fresh(metric) for name, metric in self._patterns.items()}
        self._copies = {
            replica: {
                name: _fresh(metric) if _mergeable(metric) else first[name]
                for name, metric in self._patterns.items()
            }
            for replica in range(num_replicas)
        }

    def update(self, replica: int, outputs: Nested, targets: Nested) -> None:
        """Count one microbatch, in the replica's own thread."""
        with torch.no_grad():
            for metric in self._copies[replica].values():
                metric.to(targets.device if isinstance(targets, torch.Tensor) else "cpu")
                with contextlib.nullcontext() if _mergeable(metric) else self._shared:
                    metric.update(outputs, targets)

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since :meth:`reset`; none when nothing was."""
        values = {}
        for name, pattern in self._patterns.items():
            copies = {id(c[name]): c[name] for c in self._copies.values()}
            counted = [metric for metric in copies.values() if metric.update_called]
            if counted:
                values[name] = _as_number(name, _merge(pattern, counted))
        return values


def _fresh(pattern: Metric) -> Metric:
    metric = pattern.clone()
    metric.reset()
    return metric


def _mergeable(metric: Metric) -> bool:
    """Tell whether states can be merged; a metric whose states cannot is one for all replicas."""
    return metric.full_state_update is False and not metric.dist_sync_on_step


def _merge(pattern: Metric, counted: list[Metric]) -> Metric:
    if len(counted) == 1:
        return counted[0]
    total = _fresh(pattern)
    for metric in counted:
        total.merge_state(metric.to("cpu"))
    return total


def _as_number(name: str, metric: Metric) -> float:
    value = metric.compute()
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ConfigError(
            f"Metric {name!r} must compute one number, but computes {value!r}. Give `average=` or "
            "another option that makes it one."
        )
    return float(value)
