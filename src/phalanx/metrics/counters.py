"""One metric over the batches of an epoch: a torchmetrics object, or a function of all rows."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from phalanx.errors import CheckpointError, ConfigError
from phalanx.metrics.updating import update_metric
from phalanx.metrics.whole_batches import Joining
from phalanx.plan import flatten, pack_nested, unpack_nested
from phalanx.torch_internals import pytree
from phalanx.types import Nested

__all__ = ["Counter", "open_counter"]

_TEXT = "text"


class Counter(ABC):
    """A counter of the batches of an epoch, for one metric.

    Attributes:
        num_batches: How many it has counted.
    """

    num_batches = 0

    @abstractmethod
    def fresh(self) -> Counter:
        """Return another for the same metric, which has counted nothing."""

    @abstractmethod
    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:
        """Count one batch of ``rows``."""

    @abstractmethod
    def keep(self) -> Callable[[], None]:
        """Return a function that takes back whatever is counted from now on."""

    @abstractmethod
    def compute(self) -> Any:  # Any: whatever the metric makes
        """Return the metric's value."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """Return what was counted: tensors, and what lists of the metric hold beside them."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Continue from what :meth:`capture` returned.

        Raises:
            CheckpointError: It is another metric's.
        """


# Any: what the user gave.
def open_counter(name: str, metric: Any, joining: Joining) -> Counter:
    """Return what counts for ``metric``, which is not touched.

    Raises:
        ConfigError: It is neither a metric nor a function.
    """
    if isinstance(metric, Metric):
        pattern = copy.deepcopy(metric)
        pattern.reset()
        for _, each in _metrics_in(pattern):
            each.sync_on_compute = each._to_sync = False  # every rank counts all rows
        return _MetricCounter(pattern)
    kind, way_out = f"{type(metric).__name__!r}", ""
    if isinstance(metric, type):
        kind, way_out = f"the class {metric.__name__!r}", f" Give an object: {metric.__name__}(…)."
    elif isinstance(metric, MetricCollection):
        way_out = " Give its metrics by name."
    elif callable(metric):
        return _FunctionCounter(metric, joining)
    raise ConfigError(
        "`metrics` must map names to `torchmetrics.Metric` objects or functions, but "
        f"{name!r} is {kind}.{way_out}"
    )


class _MetricCounter(Counter):
    """A torchmetrics object, updated once for each batch.

    Its states are what it has declared by `add_state`, and so for all metrics inside of it. Numbers
    that updates have changed beside them belong to it, such as the count of updates.
    """

    def __init__(self, pattern: Metric) -> None:
        self._pattern = pattern
        self._metric = copy.deepcopy(pattern)

    def fresh(self) -> _MetricCounter:
        return _MetricCounter(self._pattern)

    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:  # noqa: ARG002
        found = (leaf.device for leaf in flatten(outputs)[0] if isinstance(leaf, Tensor))
        if (device := next(found, self._metric.device)) != self._metric.device:
            self._metric.to(device)
        update_metric(self._metric, outputs, targets)
        self.num_batches += 1

    def keep(self) -> Callable[[], None]:
        num_batches = self.num_batches
        kept = [
            (owner, key, _copied(value))
            for _, owner in _metrics_in(self._metric)
            for key, value in vars(owner).items()
            if key in owner._defaults or isinstance(value, (int, float, str, type(None)))
        ]

        def put_back() -> None:
            self.num_batches = num_batches
            for owner, key, value in kept:
                setattr(owner, key, value)

        return put_back

    def compute(self) -> Any:
        return self._metric.compute()

    def capture(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        before = dict(_metrics_in(self._pattern))
        for path, owner in _metrics_in(self._metric):
            for key, value in vars(owner).items():
                name = f"{path}.{key}" if path else key
                if key in owner._defaults and isinstance(value, list):
                    tensors |= {f"{name}.{place}": each for place, each in enumerate(value)}
                elif key in owner._defaults:
                    tensors[name] = value
                elif _is_number(value) and value != vars(before[path]).get(key):
                    dtype = torch.float64 if isinstance(value, float) else torch.int64
                    tensors[name] = torch.tensor(value, dtype=dtype)
        return tensors

    def restore(self, tensors: Mapping[str, Any]) -> None:
        for path, owner in _metrics_in(self._metric):
            prefix = f"{path}." if path else ""
            for key, first in owner._defaults.items():
                if key not in vars(owner):  # a wrapper names those of the metric inside of it
                    continue
                if isinstance(first, list):
                    places = (f"{prefix}{key}.{place}" for place in range(len(tensors)))
                    found = [tensors[each] for each in places if each in tensors]
                    setattr(owner, key, _moved(found, owner.device))
                else:
                    setattr(owner, key, self._checked(f"{prefix}{key}", first, tensors))
            for key, value in list(vars(owner).items()):
                if _is_number(value) and prefix + key in tensors:
                    setattr(owner, key, tensors[prefix + key].item())

    def _checked(self, name: str, first: Tensor, tensors: Mapping[str, Any]) -> Tensor:
        """Return the state ``name``, if updates can have made it of its ``first`` value."""
        stored = tensors.get(name, first)
        try:  # an empty one stands for any
            fits = not first.numel() or first.expand_as(stored).shape == stored.shape
            fits = fits and torch.promote_types(first.dtype, stored.dtype) == stored.dtype
        except RuntimeError:
            fits = False
        if not fits or name not in tensors:
            held = f"{stored.dtype} of shape {tuple(stored.shape)}" if name in tensors else "none"
            raise CheckpointError(
                f"The checkpoint must hold `{name}` of {type(self._pattern).__name__} as "
                f"{first.dtype} of shape {tuple(first.shape)} or what updates make of it, but "
                f"holds {held}. Give `metrics=` as they were."
            )
        moved: Tensor = stored.to(first.device)
        return moved


class _FunctionCounter(Counter):
    """A function of all outputs and targets of an epoch, which are kept until it is computed."""

    def __init__(self, function: Callable[..., Any], joining: Joining) -> None:
        self._function = function
        self._joining = joining
        self._batches: list[tuple[Nested, Nested, int]] = []

    def fresh(self) -> _FunctionCounter:
        return _FunctionCounter(self._function, self._joining)

    def update(self, outputs: Nested, targets: Nested, rows: int) -> None:
        self._batches.append((outputs, targets, rows))
        self.num_batches += 1

    def keep(self) -> Callable[[], None]:
        num_batches = self.num_batches

        def put_back() -> None:
            self.num_batches = num_batches
            del self._batches[num_batches:]

        return put_back

    def compute(self) -> Any:
        outputs, targets, rows = zip(*self._batches, strict=True)
        given = [self._joining.outputs(outputs, rows, rows)]
        if any(each is not None for each in targets):
            given.append(self._joining.targets(targets, rows, rows))
        with torch.no_grad():
            return self._function(*given)

    def capture(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        text = json.dumps(
            [
                [pack_nested(tensors, outputs), pack_nested(tensors, targets), rows]
                for outputs, targets, rows in self._batches
            ]
        )
        return {**tensors, _TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        try:
            packed = json.loads(tensors[_TEXT].numpy().tobytes())
            self._batches = [
                (unpack_nested(tensors, outputs), unpack_nested(tensors, targets), int(rows))
                for outputs, targets, rows in packed
            ]
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"The checkpoint must hold what a function counts, but does not: {error!r}. Give "
                "`metrics=` as they were."
            ) from error


def _metrics_in(metric: Metric) -> Iterator[tuple[str, Metric]]:
    """Return the metric and those inside of it, by path."""
    return ((path, each) for path, each in metric.named_modules() if isinstance(each, Metric))


def _moved(values: list[Any], device: torch.device) -> list[Any]:
    return list(pytree.tree_map_only(Tensor, lambda each: each.to(device), values))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
