"""One metric over the batches of an epoch: a torchmetrics object, or a function of all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from phalanx.errors import ConfigError
from phalanx.metrics.updating import update_metric
from phalanx.metrics.whole_batches import Joining
from phalanx.plan import flatten
from phalanx.torch_internals import pytree
from phalanx.types import Nested

__all__ = ["Counter", "open_counter"]


# Any, here and below: what the user gave; what a metric holds and computes.
class _MetricCounter:
    """A torchmetrics object, updated once for each batch.

    Its state is what it has declared by `add_state`, and plain values beside that, such as the
    count of updates; and so for all metrics inside of it.
    """

    def __init__(self, pattern: Metric) -> None:
        self._pattern = pattern
        self._metric = copy.deepcopy(pattern)
        self.num_batches = 0

    @property
    def kind(self) -> str:
        """The classes of the metrics, and with which settings they begin."""
        return repr(
            {path: (type(each).__name__, _plain(each)) for path, each in _inside(self._pattern)}
        )

    def fresh(self) -> _MetricCounter:
        """Return another for the same metric, which has counted nothing."""
        return _MetricCounter(self._pattern)

    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:  # noqa: ARG002
        """Count one batch."""
        found = (leaf.device for leaf in flatten(outputs)[0] if isinstance(leaf, Tensor))
        if (device := next(found, self._metric.device)) != self._metric.device:
            self._metric.to(device)
        update_metric(self._metric, outputs, targets)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the state of each metric inside, by path; tensors and lists are copies."""
        return {
            path: _plain(each)
            | {key: _copied(vars(each)[key]) for key in each._defaults if key in vars(each)}
            for path, each in _inside(self._metric)
        }

    def load(self, state: dict[str, dict[str, Any]]) -> None:
        """Continue from a state."""
        for path, each in _inside(self._metric):
            to_device = lambda value, to=each.device: value.to(to)  # noqa: E731
            for key, value in state[path].items():
                setattr(each, key, pytree.tree_map_only(Tensor, to_device, value))

    def compute(self) -> Any:
        """Return the metric's value."""
        return self._metric.compute()


class _FunctionCounter:
    """A function of all outputs and targets of an epoch, which are kept until it is computed."""

    kind = "a function"

    def __init__(self, function: Callable[..., Any], joining: Joining) -> None:
        self._function = function
        self._joining = joining
        self._batches: list[tuple[Nested, Nested, int]] = []
        self.num_batches = 0

    def fresh(self) -> _FunctionCounter:
        """Return another for the same function, which has counted nothing."""
        return _FunctionCounter(self._function, self._joining)

    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:
        """Count one batch of ``rows``."""
        self._batches.append((outputs, targets, rows))

    def state(self) -> list[tuple[Nested, Nested, int]]:
        """Return the batches."""
        return list(self._batches)

    def load(self, state: list[tuple[Nested, Nested, int]]) -> None:
        """Continue from a state."""
        self._batches = list(state)

    def compute(self) -> Any:
        """Return the function's value for all rows."""
        outputs, targets, rows = zip(*self._batches, strict=True)
        given = [self._joining.outputs(outputs, rows, rows)]
        if any(each is not None for each in targets):
            given.append(self._joining.targets(targets, rows, rows))
        with torch.no_grad():
            return self._function(*given)


Counter: TypeAlias = _MetricCounter | _FunctionCounter


def open_counter(name: str, metric: Any, joining: Joining) -> Counter:
    """Return a counter for ``metric``, which is not touched.

    Raises:
        ConfigError: It is neither a metric nor a function.
    """
    if isinstance(metric, Metric):
        pattern = copy.deepcopy(metric)
        pattern.reset()
        for _, each in _inside(pattern):
            each.sync_on_compute = each._to_sync = False  # every rank counts all rows
        return _MetricCounter(pattern)
    way_out = ""
    if isinstance(metric, type):
        way_out = f" Give an object: {metric.__name__}(…)."
    elif isinstance(metric, MetricCollection):
        way_out = " Give its metrics by name."
    elif callable(metric):
        return _FunctionCounter(metric, joining)
    raise ConfigError(
        "`metrics` must map names to `torchmetrics.Metric` objects or functions, but "
        f"{name!r} is {metric!r:.80}.{way_out}"
    )


def _inside(metric: Metric) -> list[tuple[str, Metric]]:
    """Return the metric and those inside of it, by path."""
    return [(path, each) for path, each in metric.named_modules() if isinstance(each, Metric)]


def _plain(metric: Metric) -> dict[str, Any]:
    kinds = (int, float, str, type(None))
    return {
        key: value
        for key, value in vars(metric).items()
        if isinstance(value, kinds) and key not in metric._defaults
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value)
