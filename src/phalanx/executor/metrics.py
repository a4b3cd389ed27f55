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
from phalanx.executor.tally import (
    Arguments,
    Part,
    Tally,
    device_of,
    fresh,
    gather,
    has_rows,
    move,
    obstacle_to_merging,
)

__all__ = ["Collected", "GroupMetrics", "ReplicaMetrics"]

# Runs a function of the replica's index in every replica's thread.
Each = Callable[[Callable[[int], None]], object]


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
    warning says so once. See Note [What merges] in ``tally.py``.

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
        tallies = [self._open(each, parts) for each in members]
        for tally in tallies:
            for place, part in enumerate(parts):
                tally.update(place, part)
            tally.close(parts, dims)
        if len(tallies) == 1:
            tallies[0].settle()
        else:
            _settle_all(tallies)
        return bool(parts)

    # Any: a metric, or what has an `update` like one.
    def _open(self, metric: Any, parts: Sequence[Part]) -> Tally | _Foreign:
        if isinstance(metric, Metric):
            reason = obstacle_to_merging(metric)
            tally: Tally | _Foreign = Tally(metric)
        elif callable(getattr(metric, "update", None)) and not isinstance(metric, type):
            reason = "it is no `torchmetrics.Metric`"
            tally = _Foreign(metric)
        else:
            raise ConfigError(
                "`metric` must be a `torchmetrics.Metric` or have `update(outputs, labels)`, but "
                f"is {metric!r}. Wrap a function in `Collected`."
            )
        tally.open(parts)
        name = type(metric).__name__
        if reason is not None and name not in self._told:
            self._told.add(name)
            _tell(f"Metric `{name}`", reason)
        return tally


def _settle_all(tallies: Sequence[Tally | _Foreign]) -> None:
    """Let all members of a collection count the batch, or none: a failing one takes all back."""
    kept = [(tally, tally.keep()) for tally in tallies]
    restores = [restore for _, restore in kept if restore is not None]
    try:
        # Those that can fail come first, so that the others need no copy.
        for tally, _ in sorted(kept, key=lambda pair: pair[1] is None):
            tally.settle()
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
        for name, metric in metrics.items():
            _check(name, metric)
        self._patterns: dict[str, Metric] = {}
        for name, metric in metrics.items():
            if isinstance(metric, Metric):
                self._patterns[name] = metric
                reason = obstacle_to_merging(metric)
            else:
                self._patterns[name] = Collected(metric)
                reason = "it is a function, which wants all rows at once"
            if reason is not None:
                _tell(f"Metric {name!r}", reason)
        self.reset()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def copy(self) -> ReplicaMetrics:
        """Return the same metrics with counts of their own."""
        other = ReplicaMetrics({})  # which has nothing to warn of
        other._patterns = self._patterns
        other.reset()
        return other

    def reset(self) -> None:
        """Start counting anew."""
        self._tallies = {
            name: Tally(fresh(metric), owned=True) for name, metric in self._patterns.items()
        }

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
        tallies = list(self._tallies.values())
        for tally in tallies:
            if only:
                move(tally.total, device_of(only[0], tally.total.device))
            tally.open(only)

        def work(replica: int | None) -> None:
            for place, (owner, part) in enumerate(given):
                for tally in tallies if replica in (None, owner) else ():
                    tally.update(place, part)

        if each is None:
            work(None)
        else:
            each(work)
        for tally in tallies:
            tally.close(only)

    def commit(self) -> None:
        """Add the batch that was counted last, once."""
        for tally in self._tallies.values():
            tally.settle()

    def update(self, parts: Sequence[Part | None]) -> None:
        """Count one batch and commit it."""
        self.count(parts)
        self.commit()

    def capture(self) -> dict[str, Tensor]:
        """Return what was counted, as tensors by ``<metric>.<state>`` (``.<place>`` in a list)."""
        tensors = {}
        for name, tally in self._tallies.items():
            states = tally.total.metric_state if tally.total.update_called else {}
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
        self.reset()
        for name, pattern in self._patterns.items():
            own = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
            if own:
                states = {key.removeprefix(f"{name}."): value for key, value in own.items()}
                self._tallies[name] = Tally(_filled(pattern, states), owned=True)

    def compute(self) -> dict[str, float]:
        """Return the metrics of everything counted since :meth:`reset`; none when nothing was."""
        return {
            name: _as_number(name, tally.total)
            for name, tally in self._tallies.items()
            if tally.counted
        }


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


def _tell(what: str, reason: str) -> None:
    """Warn at the line of who called our caller's caller, which is the user's."""
    warnings.warn(
        f"{what} cannot be merged from several replicas, because {reason}; it is computed on "
        "outputs gathered on one device, with the same value.",
        stacklevel=5,
    )


def _filled(pattern: Metric, states: Mapping[str, Tensor]) -> Metric:
    """Return a metric that holds ``states``, as if it had counted them itself."""
    metric = fresh(pattern)
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


def _as_number(name: str, metric: Metric) -> float:
    value = metric.compute()
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ConfigError(
            f"Metric {name!r} must compute one number, but computes {value!r}. Give `average=` or "
            "another option that makes it one."
        )
    return float(value)
