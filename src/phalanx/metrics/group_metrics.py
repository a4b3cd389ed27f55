"""Metrics over replicas that are those of the whole batch on one device, however it was cut.

Guaranteed: states that are counts, extremes or lists of rows are bitwise those of one device; sums
of floats are the same up to the rounding of their dtype, because they are added part by part.
torchmetrics counts in float32 unless told otherwise: ``metric.set_dtype(torch.float64)`` brings
agreement to about 1e-15.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat

from phalanx.errors import CheckpointError, ConfigError
from phalanx.metrics.accumulator import Arguments, MetricAccumulator, fresh, obstacle_to_merging
from phalanx.metrics.device_parts import Part, device_of, gather, has_rows

__all__ = ["Collected", "GroupMetrics", "accumulator_of", "read_metrics", "uncounted"]


class Collected(Metric):
    """A function of all outputs and all labels, as a metric: it keeps them until it is computed.

    Args:
        function: (outputs, labels) -> value; called once, with all rows in their order. Without
            labels: (outputs) -> value.
        dims: Along which rows lie in outputs and in labels. A group says it by itself.

    Shapes:
        N: rows counted since :meth:`reset`. Outputs [N, …], labels [N, …], for dims (0, 0).

    Example:
        >>> largest_error = Collected(lambda outputs, labels: (outputs - labels).abs().max())
        >>> largest_error.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0]))
        >>> largest_error.update(torch.tensor([4.0]), torch.tensor([3.0]))
        >>> largest_error.compute()
        tensor(3.)
    """

    full_state_update = False
    kept_outputs: list[Tensor]  # rows first, so that whoever joins lists of rows joins them right
    kept_labels: list[Tensor]

    # Any: the user's own value.
    def __init__(self, function: Callable[..., Any], dims: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.function = function
        self.dims = dims
        self.add_state("kept_outputs", [], dist_reduce_fx="cat")
        self.add_state("kept_labels", [], dist_reduce_fx="cat")

    # Any: tensors; anything else is refused.
    def update(self, outputs: Any, labels: Any = None) -> None:
        """Keep some rows.

        Raises:
            ConfigError: They are no tensors with rows.
        """
        kept = [outputs] if labels is None else [outputs, labels]
        for value, dim in zip(kept, self.dims, strict=False):
            if not isinstance(value, Tensor) or value.dim() <= dim:
                told = _shown(value)
                raise ConfigError(
                    f"`Collected` must be given tensors with rows, but is given {told}. Return one "
                    "tensor from the module, or write a `torchmetrics.Metric`."
                )
        self.kept_outputs.append(outputs.detach().movedim(self.dims[0], 0))
        if labels is not None:
            self.kept_labels.append(labels.detach().movedim(self.dims[1], 0))

    def compute(self) -> Any:  # Any: the user's own value
        """Return the function of everything kept."""
        columns = zip((self.kept_outputs, self.kept_labels), self.dims, strict=True)
        return self.function(
            *(dim_zero_cat(kept).movedim(0, dim) for kept, dim in columns if len(kept))
        )


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "one number" if not value.dim() else f"shape {tuple(value.shape)}"


class GroupMetrics:
    """Update metrics of the user's from outputs that lie on several devices.

    A metric that cannot be merged is updated once per batch, on rows gathered where it lies; a
    warning says so once. See Note [What merges] in ``accumulator.py``.

    Example:
        >>> from torchmetrics.regression import MeanSquaredError
        >>> metric = MeanSquaredError()
        >>> a, b = torch.tensor([1.0]), torch.tensor([2.0, 4.0, 6.0])
        >>> GroupMetrics().update_metric(metric, [(a, a * 0, None), None, (b, b * 0, None)])
        True
        >>> metric.compute()  # (1 + 4 + 16 + 36) / 4, where a mean of means gives 9.83
        tensor(14.2500)
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    # Any: a metric, or what has an `update` like one.
    def update_metric(
        self, metric: Any, per_device: Sequence[Part | None], dims: tuple[int, int] = (0, 0)
    ) -> bool:
        """Count one batch; ``metric`` has counted all of it, as one device would have, or nothing.

        Args:
            metric: A metric, a `MetricCollection`, or an object with ``update(outputs, labels)``.
                It stays on its device.
            per_device: (outputs, labels, weights) of each device, without padded rows; None for
                one that took no part. Outputs and labels are given to the metric as they are: one
                tensor rather than a list of one. Labels may be None, and are left out where
                ``update`` takes none. Weights are one per row, or None.
            dims: Along which rows lie in outputs and labels, to gather them.

        Returns:
            Whether there was anything to count.

        Raises:
            ConfigError: Weights are given and ``update`` takes none; a device's output is one
                number and nothing says of how many rows; ``metric`` has no `update`.
        """
        parts = [part for part in per_device if part is not None and has_rows(part)]
        if isinstance(metric, MetricCollection):
            # Apart from each other: members of a compute group would share one state.
            members = list(metric.values(copy_state=True))
        else:
            members = [metric]
        for each in members:
            if isinstance(each, Collected):
                each.dims = dims  # its rows are joined when it is computed, not here
        accumulators = [self._open(each, parts) for each in members]
        for accumulator in accumulators:
            for place, part in enumerate(parts):
                accumulator.update(place, part)
            accumulator.close(parts, dims)
        if len(accumulators) == 1:
            accumulators[0].settle()
        else:
            _settle_all(accumulators)
        return bool(parts)

    # Any: a metric, or what has an `update` like one.
    def _open(self, metric: Any, parts: Sequence[Part]) -> MetricAccumulator | _Foreign:
        if isinstance(metric, Metric):
            reason = obstacle_to_merging(metric)
            accumulator: MetricAccumulator | _Foreign = MetricAccumulator(metric)
        elif callable(getattr(metric, "update", None)) and not isinstance(metric, type):
            reason = "it is no `torchmetrics.Metric`"
            accumulator = _Foreign(metric)
        else:
            raise ConfigError(
                "`metric` must be a `torchmetrics.Metric` or have `update(outputs, labels)`, but "
                f"is {metric!r}. Wrap a function in `Collected`."
            )
        accumulator.open(parts)
        name = type(metric).__name__
        if reason is not None and name not in self._told:
            self._told.add(name)
            _tell(f"Metric `{name}`", reason)
        return accumulator


def _settle_all(accumulators: Sequence[MetricAccumulator | _Foreign]) -> None:
    """Let all members of a collection count the batch, or none: a failing one takes all back."""
    kept = [(accumulator, accumulator.keep()) for accumulator in accumulators]
    restores = [restore for _, restore in kept if restore is not None]
    try:
        # Those that can fail come first, so that the others need no copy.
        for accumulator, _ in sorted(kept, key=lambda pair: pair[1] is None):
            accumulator.settle()
    except BaseException:
        for restore in restores:
            restore()
        raise


class _Foreign:
    """What has an `update` like a metric, and nothing else that we know of."""

    # Any: whatever the user has written.
    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._arguments = Arguments.of(metric)
        self._whole: Part | None = None

    def open(self, parts: Sequence[Part]) -> None:
        self._arguments.check(parts)

    def update(self, place: int, part: Part) -> None:
        pass  # all together

    def close(self, parts: Sequence[Part], dims: tuple[int, int]) -> None:
        if parts:
            weighted = [self._arguments.weighted(part) for part in parts]
            self._whole = gather(weighted, dims, device_of(parts[0], torch.device("cpu")))

    def keep(self) -> None:
        """There is no way back for what we do not know."""

    def settle(self) -> None:
        if self._whole is not None:
            with torch.no_grad():
                self._arguments.call(self._metric.update, self._whole)


# Any: metrics and functions.
def read_metrics(given: Mapping[str, Any]) -> dict[str, Metric]:
    """Return metrics for what :class:`ReplicaMetrics` is given; warn of those that do not merge.

    Raises:
        ConfigError: One is neither a metric nor a function.
    """
    for name, metric in given.items():
        _check(name, metric)
    found: dict[str, Metric] = {}
    for name, metric in given.items():
        if isinstance(metric, Metric):
            found[name] = metric
            reason = obstacle_to_merging(metric)
        else:
            found[name] = Collected(metric)
            reason = "it is a function, which wants all rows at once"
        if reason is not None:
            _tell(f"Metric {name!r}", reason, frames=6)
    return found


# Any: a metric or a function.
def uncounted(given: Any) -> Metric:
    """Return a metric of its own for ``given`` that has counted nothing."""
    return fresh(given) if isinstance(given, Metric) else Collected(given)


def accumulator_of(pattern: Metric, states: Mapping[str, Tensor]) -> MetricAccumulator:
    """Return a copy of ``pattern`` that has counted what ``states`` say; nothing without any.

    Raises:
        CheckpointError: They are another metric's.
    """
    metric = fresh(pattern)
    if states:
        _fill(metric, states)
    return MetricAccumulator(metric, owned=True)


# Any: what the user gave.
def _check(name: str, metric: Any) -> None:
    if isinstance(metric, Metric):
        return
    kind = f"{type(metric).__name__!r}"
    way_out = ""
    if isinstance(metric, type):
        kind, way_out = f"the class {metric.__name__!r}", f" Give an object: {metric.__name__}(…)."
    elif isinstance(metric, MetricCollection):
        way_out = " Give its metrics by name."
    elif callable(metric):
        return
    raise ConfigError(
        "`metrics` must map names to `torchmetrics.Metric` objects or functions, but "
        f"{name!r} is {kind}.{way_out}"
    )


def _tell(what: str, reason: str, frames: int = 5) -> None:
    """Warn at the user's line, which is so many frames up."""
    warnings.warn(
        f"{what} cannot be merged from several replicas, because {reason}; it is computed on "
        "outputs gathered on one device, with the same value.",
        stacklevel=frames,
    )


def _fill(metric: Metric, states: Mapping[str, Tensor]) -> None:
    """Let ``metric`` hold ``states``, as if it had counted them itself."""
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
            _check_state(f"{type(metric).__name__}.{key}", states[key], value)
            setattr(metric, key, states[key])
    metric._update_count = 1


def _check_state(name: str, stored: Tensor, first: Tensor) -> None:
    """Refuse what adding to the ``first`` value of a state cannot have led to."""
    try:  # an empty one stands for any
        fits = not first.numel() or first.expand_as(stored).shape == stored.shape
    except RuntimeError:
        fits = False
    fits = fits and _kind(first) == _kind(stored)
    if not fits:
        raise CheckpointError(
            f"The checkpoint must hold {name} as {first.dtype} of shape {tuple(first.shape)} or "
            f"what adding makes of it, but holds {stored.dtype} of shape {tuple(stored.shape)}. "
            "Give `metrics=` as they were."
        )


def _kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Return what adding does not change; floats of 8 bits cannot be added at all."""
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.is_complex(), tensor.dtype == torch.bool, is_float8
