"""Metrics by name, or none: then torchmetrics is not imported, which takes as long as torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError
from phalanx.metrics.updating import as_floats
from phalanx.metrics.whole_batches import Joining
from phalanx.types import Nested

if TYPE_CHECKING:
    from phalanx.metrics.counters import Counter

__all__ = ["Metrics"]


class Metrics:
    """Metrics by name, each updated once for every batch, with all its rows in order.

    Args:
        metrics: By name: torchmetrics objects, which serve as patterns and are not touched, or
            functions of (outputs, targets), called with all rows of an epoch.
        joining: How pieces of a batch, and for functions the batches of an epoch, become one.

    Raises:
        ConfigError: One is neither a metric nor a function.
    """

    # Any, here and below: a metric or a function, and what it holds.
    def __init__(self, metrics: Mapping[str, Any], joining: Joining) -> None:
        self.joining = joining
        self._counters: dict[str, Counter] = {}
        self._kept: dict[str, Any] = {}
        if metrics:
            from phalanx.metrics import counters  # slow, as said above

            self._counters = {
                name: counters.open_counter(name, metric, joining)
                for name, metric in metrics.items()
            }

    def __bool__(self) -> bool:
        return bool(self._counters)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the metrics were given by."""
        return tuple(self._counters)

    def fresh(self) -> Metrics:
        """Return the same metrics, which have counted nothing."""
        other = Metrics({}, self.joining)
        other._counters = {name: counter.fresh() for name, counter in self._counters.items()}
        return other

    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:
        """Count one batch of ``rows``."""
        for counter in self._counters.values():
            counter.update(outputs, targets, rows)
            counter.num_batches += 1

    def keep(self) -> None:
        """Let :meth:`rollback` take back everything counted until :meth:`commit`."""
        self._kept = self._states()

    def commit(self) -> None:
        """Let everything counted since :meth:`keep` count for good."""
        self._kept = {}

    def rollback(self) -> None:
        """Take back everything counted since :meth:`keep`, unless it was committed."""
        for name, (num_batches, state) in self._kept.items():
            self._counters[name].load(state)
            self._counters[name].num_batches = num_batches
        self._kept = {}

    def capture(self) -> dict[str, Any]:
        """Return everything counted, by name; and of which kind each metric is."""
        return {name: (self._counters[name].kind, *state) for name, state in self._states().items()}

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Continue from what :meth:`capture` returned; of metrics that have counted nothing.

        Raises:
            CheckpointError: It was captured from other metrics.
        """
        for name, (kind, num_batches, state) in captured.items():
            counter = self._counters.get(name)
            if counter is None:
                continue
            if counter.kind != kind:
                raise CheckpointError(
                    f"The checkpoint must hold the counts of {name!r} as {counter.kind:.200}, but "
                    f"holds those of {kind:.200}. Give `metrics=` as they were."
                )
            counter.load(state)
            counter.num_batches = num_batches

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted; none when nothing was."""
        means: dict[str, float] = {}
        for name, counter in self._counters.items():
            if counter.num_batches:
                means |= as_floats(name, counter.compute())
        return means

    def _states(self) -> dict[str, tuple[int, Any]]:
        return {name: (each.num_batches, each.state()) for name, each in self._counters.items()}
