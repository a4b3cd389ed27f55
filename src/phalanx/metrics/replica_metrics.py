"""Metrics by name over replicas, or none: then torchmetrics is not imported.

It takes as long to import as most of torch does, and every worker process imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.metrics.device_parts import Part, has_rows

if TYPE_CHECKING:
    from torchmetrics import Metric

    from phalanx.metrics.accumulator import MetricAccumulator

__all__ = ["ReplicaMetrics"]

# Runs a function of the replica's index in every replica's thread.
Each = Callable[[Callable[[int], None]], object]


class ReplicaMetrics:
    """Metrics by name over whatever replicas compute.

    Every microbatch is counted by itself, in the thread of the replica that has it, and added in
    the order of microbatches: who computed it does not show in the bits.

    Args:
        metrics: By name; they serve as patterns and are not touched. A function of (outputs,
            labels) is called with all rows when asked for its value; see :class:`Collected`.

    Raises:
        ConfigError: One is neither a metric nor a function.
    """

    # Any: a metric or a function.
    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._patterns: dict[str, Metric] = {}
        if metrics:
            from phalanx.metrics.group_metrics import read_metrics  # slow, as said above

            self._patterns = read_metrics(metrics)
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    @property
    def names(self) -> tuple[str, ...]:
        """What they were given as."""
        return tuple(self._patterns)

    def copy(self) -> ReplicaMetrics:
        """Return the same metrics with counts of their own."""
        other = ReplicaMetrics({})  # which has nothing to warn of
        other._patterns = self._patterns
        other.reset()
        return other

    def reset(self) -> None:
        """Start counting anew."""
        self.restore({})

    def count(
        self,
        parts: Sequence[Part | None],
        *,
        replica_of: Sequence[int] | None = None,
        each: Each | None = None,
    ) -> None:
        """Count one batch; what :meth:`compute` returns changes with :meth:`commit` only.

        Args:
            parts: (outputs, labels, weights) by microbatch, None for those that were left out; see
                :meth:`GroupMetrics.update_metric`.
            replica_of: Which replica has each; default: the one of its number.
            each: Runs a function in all replicas' threads; default: all is done in this one.

        Raises:
            Exception: What a metric raised; nothing is pending then.
        """
        owners = range(len(parts)) if replica_of is None else replica_of
        given = [
            (owner, part)
            for owner, part in zip(owners, parts, strict=True)
            if part is not None and has_rows(part)
        ]
        only = [part for _, part in given]
        accumulators = list(self._accumulators.values())
        for accumulator in accumulators:
            accumulator.open(only)

        def work(replica: int | None) -> None:
            for place, (owner, part) in enumerate(given):
                for accumulator in accumulators if replica in (None, owner) else ():
                    accumulator.update(place, part)

        if each is None:
            work(None)
        else:
            each(work)
        for accumulator in accumulators:
            accumulator.close(only)

    def commit(self) -> None:
        """Add the batch that was counted last, once."""
        for accumulator in self._accumulators.values():
            accumulator.settle()

    def update(self, parts: Sequence[Part | None]) -> None:
        """Count one batch and commit it."""
        self.count(parts)
        self.commit()

    def capture(self) -> dict[str, Tensor]:
        """Return what was counted, as tensors by ``<metric>.<state>`` (``.<place>`` in a list)."""
        tensors = {}
        for name, accumulator in self._accumulators.items():
            states = accumulator.total.metric_state if accumulator.total.update_called else {}
            for key, value in states.items():
                if isinstance(value, list):
                    tensors.update({f"{name}.{key}.{i}": each for i, each in enumerate(value)})
                else:
                    tensors[f"{name}.{key}"] = value
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on counting from what :meth:`capture` returned.

        Raises:
            CheckpointError: It was captured from other metrics.
        """
        accumulators: dict[str, MetricAccumulator] = {}
        if self._patterns:
            from phalanx.metrics.group_metrics import accumulator_of  # slow, as said above

            for name, pattern in self._patterns.items():
                own = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
                states = {key.removeprefix(f"{name}."): value for key, value in own.items()}
                accumulators[name] = accumulator_of(pattern, states)
        self._accumulators = accumulators

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since :meth:`reset`; none when nothing was."""
        return {
            name: _as_number(name, accumulator.total)
            for name, accumulator in self._accumulators.items()
            if accumulator.counted
        }


def _as_number(name: str, metric: Metric) -> float:
    value = metric.compute()
    if not isinstance(value, int | float) and not (
        isinstance(value, Tensor) and value.numel() == 1
    ):
        raise ConfigError(
            f"Metric {name!r} must compute one number, but computes {value!r}. Give `average=` or "
            "another option that makes it one."
        )
    return float(value)
