"""Metrics by name, or none: then torchmetrics is not imported.

It takes as long to import as most of torch does, and every worker process imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

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

    # Any: a metric or a function.
    def __init__(self, metrics: Mapping[str, Any], joining: Joining) -> None:
        self.joining = joining
        self._counters: dict[str, Counter] = {}
        self._take_back: list[Callable[[], None]] = []
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

    def keep(self) -> None:
        """Let :meth:`rollback` take back what is counted until :meth:`commit`."""
        self._take_back = [counter.keep() for counter in self._counters.values()]

    def commit(self) -> None:
        """Let what was counted count for good."""
        self._take_back = []

    def rollback(self) -> None:
        """Take back what was counted since :meth:`keep`, unless it was committed."""
        for take_back in self._take_back:
            take_back()
        self._take_back = []

    # Any, here and below: lists of a metric may hold what is no tensor.
    def capture(self) -> dict[str, Any]:
        """Return what was counted, by ``<metric>.<state>``."""
        tensors: dict[str, Any] = {}
        for name, counter in self._counters.items():
            if counter.num_batches:
                tensors[name] = torch.tensor(counter.num_batches)
                tensors |= {f"{name}.{key}": each for key, each in counter.capture().items()}
        return tensors

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Continue from what :meth:`capture` returned; of metrics that have counted nothing.

        Raises:
            CheckpointError: It was captured from other metrics.
        """
        for name, counter in self._counters.items():
            if name in tensors:
                prefix = f"{name}."
                own = {
                    k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
                }
                counter.restore(own)
                counter.num_batches = int(tensors[name])

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted; none when nothing was."""
        means: dict[str, float] = {}
        for name, counter in self._counters.items():
            if counter.num_batches:
                means |= as_floats(name, counter.compute())
        return means
