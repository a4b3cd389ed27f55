"""The update of a metric with a batch, and its value as numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.types import Nested

__all__ = ["as_floats", "device_of", "update_metric"]

_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")


# Any: a metric, or what has an `update` like one.
def update_metric(metric: Any, outputs: Nested, targets: Nested) -> None:
    """Call ``metric.update(outputs, targets)``, without targets where it takes none."""
    with torch.no_grad():
        if targets is not None and _takes_targets(metric):
            metric.update(outputs, targets)
        else:
            metric.update(outputs)


def device_of(metric: Any, default: torch.device) -> torch.device:
    """Return where a metric, or the first of a collection, counts."""
    modules = metric.modules() if isinstance(metric, nn.Module) else ()
    found = (getattr(each, "device", None) for each in modules)
    return next((each for each in found if isinstance(each, torch.device)), default)


def _takes_targets(metric: Any) -> bool:
    """Tell whether ``update`` has a second position that is no weight of values.

    One that passes everything on, as wrappers do, takes what the first metric inside of it takes.
    """
    for each in metric.modules() if isinstance(metric, nn.Module) else [metric]:
        update: Any = getattr(each, "update", None)
        if not callable(update):
            continue
        parameters = inspect.signature(update).parameters.values()
        if any(parameter.kind not in _ANYTHING for parameter in parameters):
            names = [each.name for each in parameters if each.kind in _BY_POSITION]
            return len([name for name in names if name not in _WEIGHTS]) > 1
    return True


# Any: whatever a metric computes.
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
