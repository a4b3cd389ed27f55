"""Metrics by name: each is updated once for every batch, with all its rows in order.

torchmetrics is imported where a metric is given, and not before: that takes as long as torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import CheckpointError, ConfigError
from phalanx.metrics.whole_batches import Joining
from phalanx.plan import check_argument, flatten
from phalanx.torch_internals import pytree
from phalanx.types import Nested

if TYPE_CHECKING:
    from torchmetrics import Metric


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")


# Any, in this file: a metric or a function of the user's, what it holds and what it computes.
class Metrics:
    """Metrics by name; none by default.

    Args:
        metrics: By name: torchmetrics objects, which serve as patterns and are not touched, or
            functions of (outputs, targets), called with all rows of an epoch.
        joining: How pieces of a batch, and for functions the batches of an epoch, become one.

    Raises:
        ConfigError: They have no names; or one is neither a metric nor a function.
    """

    def __init__(self, metrics: Mapping[str, Any], joining: Joining) -> None:
        way_out = "Give each a name: {'accuracy': accuracy}."
        fits = isinstance(metrics, Mapping)
        check_argument(fits, "metrics", "map names to metrics or functions", metrics, way_out)
        others = "have other names than 'loss', which the loss has"
        check_argument("loss" not in metrics, "metrics", others, [*metrics])
        self.joining = joining
        self._metrics = dict(metrics)
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._counters)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the metrics were given by."""
        return tuple(self._counters)

    def reset(self) -> None:
        """Forget everything counted."""
        self._counters = {name: _open_counter(name, each) for name, each in self._metrics.items()}

    def fresh(self) -> Metrics:
        """Return the same metrics, which have counted nothing."""
        return Metrics(self._metrics, self.joining)

    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:
        """Count one batch of ``rows``."""
        for counter in self._counters.values():
            counter.update(outputs, targets, rows)
            counter.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything counted, by name; and of which kind each metric is."""
        return {
            name: (each.kind, each.num_batches, each.state())
            for name, each in self._counters.items()
            if each.num_batches
        }

    def load_state_dict(self, captured: Mapping[str, Any], /) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            CheckpointError: It was captured from other metrics.
        """
        self.reset()
        for name in captured.keys() & self._counters.keys():
            counter, (kind, num_batches, state) = self._counters[name], captured[name]
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
                means |= as_floats(name, counter.compute(self.joining))
        return means


class _MetricCounter:
    """A torchmetrics object, updated once for each batch.

    Its state is what it has declared by `add_state`, and other plain values, such as the
    count of updates; and so for all metrics inside of it.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        inside = {path: (type(each).__name__, _plain(each)) for path, each in self._inside()}
        self.kind = repr(inside)  # the classes, and the settings that they begin with
        self.num_batches = 0

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
            for path, each in self._inside()
        }

    def load(self, state: dict[str, dict[str, Any]]) -> None:
        """Continue from a state."""
        for path, each in self._inside():
            to_device = lambda value, to=each.device: value.to(to)  # noqa: E731
            for key, value in state[path].items():
                setattr(each, key, pytree.tree_map_only(Tensor, to_device, value))

    def compute(self, joining: Joining) -> Any:  # noqa: ARG002
        """Return the metric's value."""
        return self._metric.compute()

    def _inside(self) -> list[tuple[str, Metric]]:
        """Return the metric and those inside of it, by path."""
        return [each for each in self._metric.named_modules() if hasattr(each[1], "_defaults")]


class _FunctionCounter:
    """A function of all outputs and targets of an epoch, which are kept until it is computed."""

    kind = "a function"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._batches: list[tuple[Nested, Nested, int]] = []
        self.num_batches = 0

    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:
        """Count one batch of ``rows``."""
        self._batches.append((outputs, targets, rows))

    def state(self) -> list[tuple[Nested, Nested, int]]:
        """Return the batches."""
        return list(self._batches)

    def load(self, state: list[tuple[Nested, Nested, int]]) -> None:
        """Continue from a state."""
        self._batches = list(state)

    def compute(self, joining: Joining) -> Any:
        """Return the function's value for all rows."""
        outputs, targets, rows = zip(*self._batches, strict=True)
        given = [joining.join(outputs, rows, rows)]
        if any(each is not None for each in targets):
            given.append(joining.join(targets, rows, rows, are_targets=True))
        with torch.no_grad():
            return self._function(*given)


_Counter: TypeAlias = _MetricCounter | _FunctionCounter


def _open_counter(name: str, metric: Any) -> _Counter:
    """Return a counter for ``metric``, which is not touched."""
    from torchmetrics import Metric, MetricCollection  # slow, as said above

    if isinstance(metric, Metric):
        own = copy.deepcopy(metric)
        own.reset()
        for each in own.modules():
            if isinstance(each, Metric):
                each.sync_on_compute = each._to_sync = False  # every rank counts all rows
        return _MetricCounter(own)
    way_out = ""
    if isinstance(metric, type):
        way_out = f" Give an object: {metric.__name__}(…)."
    elif isinstance(metric, MetricCollection):
        way_out = " Give its metrics by name."
    elif callable(metric):
        return _FunctionCounter(metric)
    raise ConfigError(
        "`metrics` must map names to `torchmetrics.Metric` objects or functions, but "
        f"{name!r} is {metric!r:.80}.{way_out}"
    )


def _plain(metric: Metric) -> dict[str, Any]:
    kinds = (int, float, str, type(None))
    return {
        key: value
        for key, value in vars(metric).items()
        if isinstance(value, kinds) and key not in metric._defaults
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value)


def update_metric(metric: Any, outputs: Nested, targets: Nested) -> None:
    """Call ``metric.update(outputs, targets)``, without targets where it takes none."""
    with torch.no_grad():
        if targets is not None and _takes_targets(metric):
            metric.update(outputs, targets)
        else:
            metric.update(outputs)


def _takes_targets(metric: Any) -> bool:
    """Tell whether ``update`` has a second position that is no weight of values.

    One that passes everything on, as wrappers do, takes what the first metric inside of it takes.
    """
    for each in metric.modules() if isinstance(metric, nn.Module) else [metric]:
        update: Any = getattr(each, "update", None)
        if callable(update):
            parameters = inspect.signature(update).parameters.values()
            names = [each.name for each in parameters if each.kind in _BY_POSITION]
            if names:
                return any(name not in _WEIGHTS for name in names[1:])
    return True


def as_floats(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value by name, and several numbers each by where it is in the value.

    Metrics count in float32, whose 0.31 is 0.3100000023841858 as a Python float; it becomes 0.31,
    the shortest float that is the same in the value's own precision.

    Raises:
        ConfigError: It holds something else than numbers.

    Example:
        >>> as_floats("accuracy", torch.tensor(0.31))
        {'accuracy': 0.31}
        >>> as_floats("recall", {"mean": torch.tensor(0.5), "each": torch.tensor([0.25, 0.75])})
        {'recall.mean': 0.5, 'recall.each.0': 0.25, 'recall.each.1': 0.75}
    """
    if isinstance(value, (Tensor, np.ndarray)):
        wide = torch.as_tensor(value).detach().cpu()
        narrow = wide.is_floating_point() and wide.dtype != torch.float64
        value = wide.float().numpy() if narrow else wide.numpy()
        value = value.reshape(-1)[0] if value.size == 1 else list(value)
    if isinstance(value, (np.float16, np.float32)):
        return {name: float(str(value))}
    if isinstance(value, (int, float, np.number, np.bool_)):
        return {name: float(value)}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        parts = (as_floats(f"{name}.{key}", each) for key, each in value.items())
        return {key: number for part in parts for key, number in part.items()}
    raise ConfigError(f"Metric {name!r} must compute numbers, but computes {value!r:.80}.")
