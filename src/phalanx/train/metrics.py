"""Exact metrics over replicas: every replica counts for itself, the counts are merged."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torchmetrics import Metric

from phalanx.errors import CheckpointError, ConfigError
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
        self._whole: dict[str, Metric] = {}
        self._lock = threading.Lock()
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def copy(self) -> ReplicaMetrics:
        """Return the same metrics with counts of their own."""
        return ReplicaMetrics(self._patterns)

    def reset(self) -> None:
        """Start counting anew."""
        self._copies = {}
        self._whole = {
            name: _fresh(metric)
            for name, metric in self._patterns.items()
            if not _mergeable(metric)
        }

    def update(self, replica: int, outputs: Nested, targets: Nested) -> None:
        """Count one microbatch, in the replica's own thread."""
        device = targets.device if isinstance(targets, torch.Tensor) else "cpu"
        with torch.no_grad():
            for metric in self._copies_of(replica).values():
                metric.to(device)
                metric.update(outputs, targets)
            for metric in self._whole.values():
                with self._lock:
                    metric.to(device)
                    metric.update(outputs, targets)

    def _copies_of(self, replica: int) -> dict[str, Metric]:
        if replica not in self._copies:
            self._copies[replica] = {
                name: _fresh(metric)
                for name, metric in self._patterns.items()
                if name not in self._whole
            }
        return self._copies[replica]

    def capture(self) -> dict[str, torch.Tensor]:
        """Return what was counted, as tensors by ``<metric>.<state>`` (``.<place>`` in a list)."""
        tensors = {}
        for name in self._patterns:
            counted = self._counted(name)
            states = _merge(counted).metric_state if counted else {}
            for key, value in states.items():
                if isinstance(value, list):
                    tensors.update({f"{name}.{key}.{i}": each for i, each in enumerate(value)})
                else:
                    tensors[f"{name}.{key}"] = value
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on counting from what :meth:`capture` returned.

        Raises:
            CheckpointError: It was captured from other metrics.
        """
        self.reset()
        for name, pattern in self._patterns.items():
            own = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
            if own:
                self._copies_of(0)
                (self._whole if name in self._whole else self._copies[0])[name] = _filled(
                    pattern, {key.removeprefix(f"{name}."): value for key, value in own.items()}
                )

    def _counted(self, name: str) -> list[Metric]:
        copies = [c[name] for c in self._copies.values() if name in c]
        copies += [self._whole[name]] if name in self._whole else []
        return [metric for metric in copies if metric.update_called]

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since :meth:`reset`; none when nothing was."""
        values = {}
        for name in self._patterns:
            counted = self._counted(name)
            if counted:
                values[name] = _as_number(name, _merge(counted))
        return values


def _fresh(pattern: Metric) -> Metric:
    metric = pattern.clone()
    metric.reset()
    return metric


def _filled(pattern: Metric, states: Mapping[str, torch.Tensor]) -> Metric:
    """Return a metric that holds ``states``, as if it had counted them itself."""
    metric = _fresh(pattern)
    wanted = {key for key, value in metric.metric_state.items() if not isinstance(value, list)}
    if not wanted <= set(states):
        raise CheckpointError(
            f"The checkpoint must hold {sorted(wanted)} of {type(metric).__name__}, but holds "
            f"{sorted(states)}. Give `metrics=` as they were."
        )
    for key, value in metric.metric_state.items():
        if isinstance(value, list):
            places = [f"{key}.{place}" for place in range(len(states))]
            setattr(metric, key, [states[place] for place in places if place in states])
        else:
            setattr(metric, key, states[key])
    metric._update_count = 1
    return metric


def _mergeable(metric: Metric) -> bool:
    """Tell whether states can be merged; a metric whose states cannot is one for all replicas."""
    return metric.full_state_update is False and not metric.dist_sync_on_step


def _merge(counted: list[Metric]) -> Metric:
    if len(counted) == 1:
        return counted[0]
    first, *others = counted
    total = first.clone().to("cpu")
    for metric in others:
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
