"""One metric over the parts of a batch: what may be merged is counted apart, the rest together.

    part 0 ── copy 0 ─┐
    part 1 ── copy 1 ─┼─ states added in the order of the parts ── total        (states merge)
    part 2 ── copy 2 ─┘

    part 0 ─┐
    part 1 ─┼─ rows gathered in the order of the parts ── total.update          (they do not)
    part 2 ─┘

# Note [What merges]

A state merges exactly if it is a sum, a maximum, a minimum, or a list of rows (``dist_reduce_fx``
"sum", "max", "min", "cat"), and every update does the same whatever was counted before
(``full_state_update=False``). A "mean" of states is an average of averages; a state without a rule,
or with a function of the author's, says nothing about unequal parts. Metrics with metrics inside
(wrappers, sums of metrics) keep their states elsewhere. Those are counted on gathered rows, once
per batch, just as on one device.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_min,
    dim_zero_sum,
)

from phalanx.errors import ConfigError
from phalanx.metrics.device_parts import Part, device_of, gather, is_scalar, moved, num_rows
from phalanx.types import Nested

__all__ = ["Arguments", "MetricAccumulator", "fresh", "move", "obstacle_to_merging"]

_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BOUND = ("update", "compute", "_update_signature")  # what torchmetrics itself does not copy
_LABEL_NAMES = ("label", "labels", "target", "targets", "y_true")
_WEIGHT_NAMES = ("weight", "weights", "sample_weight", "sample_weights")


def _cat(own: Tensor | list[Tensor], other: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """Append; what a list-state holds as one tensor (after a sync) becomes a list again."""
    if isinstance(own, Tensor) and isinstance(other, Tensor):
        return torch.cat([own, other])
    left = own if isinstance(own, list) else [own]
    left.extend(other if isinstance(other, list) else [other])
    return left


# Any: a state is a tensor or a list of them, by its rule.
_RULES: dict[Any, Callable[[Any, Any], Any]] = {
    dim_zero_sum: torch.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
    dim_zero_cat: _cat,
}


def obstacle_to_merging(metric: Metric) -> str | None:
    """Say why states of ``metric`` cannot be merged exactly, or None. See Note [What merges]."""
    if type(metric).merge_state is not Metric.merge_state:
        return None  # its author has written how
    if any(isinstance(child, Metric) for child in metric.children()):
        return "it has other metrics inside"
    if not metric._defaults:
        return "it declares no state"
    for name, rule in metric._reductions.items():
        if rule not in _RULES:
            told = "no `dist_reduce_fx`" if rule is None else _named(rule)
            return f"its state `{name}` has {told}"
        if (rule is dim_zero_cat) != isinstance(metric._defaults[name], list):
            kind = type(metric._defaults[name]).__name__
            return f"its state `{name}` is a {kind} with {_named(rule)}"
    if metric.full_state_update is not False:
        return f"it has full_state_update={metric.full_state_update}"
    return None


# Any: whatever the author of the metric gave.
def _named(rule: Any) -> str:
    name = getattr(rule, "__name__", type(rule).__name__).removeprefix("dim_zero_")
    return f"dist_reduce_fx={name!r}"


@dataclass(frozen=True)
class Arguments:
    """What ``update`` of a metric takes.

    Attributes:
        metric: The name of its class, for errors.
        takes_labels: Whether there is a second position that is no weight.
        weight: The name of its weights, or None.
        broadcasts: Whether weights must have a shape that broadcasts to the values'.
        labels_first: Whether labels stand before outputs: by their names, or by an attribute
            ``labels_first`` of the metric.
        takes_lists: Whether it wants lists, of one as well, by an attribute ``takes_lists``.
    """

    metric: str
    takes_labels: bool
    weight: str | None
    broadcasts: bool
    labels_first: bool = False
    takes_lists: bool = False

    @staticmethod
    def of(metric: Any) -> Arguments:  # Any: a metric, or what has an `update` like one
        """Read the signature of ``metric.update``, of the one metric inside if it passes all on."""
        name, parameters = type(metric).__name__, _parameters(metric)
        while all(each.kind in _ANYTHING for each in parameters):
            children = metric.children() if isinstance(metric, Metric) else ()
            inside = [each for each in children if isinstance(each, Metric)]
            if len(inside) != 1:
                break
            metric, parameters = inside[0], _parameters(inside[0])
        positions = [
            each
            for each in parameters
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            and each.name not in _WEIGHT_NAMES
        ]
        unlimited = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        weights = [each.name for each in parameters if each.name in _WEIGHT_NAMES]
        return Arguments(
            metric=name,
            takes_labels=len(positions) > 1 or unlimited,
            weight=weights[0] if weights else None,
            broadcasts=isinstance(metric, MeanMetric),
            labels_first=bool(getattr(metric, "labels_first", _begins_with_labels(positions))),
            takes_lists=bool(getattr(metric, "takes_lists", False)),
        )

    def check(self, parts: Sequence[Part]) -> None:
        """Refuse weights where none are taken, and means of unknown size.

        Raises:
            ConfigError: Weights are given and the metric takes none; or they are given for some
                parts only; or an output is one number and it is not known of how many rows.
        """
        given = [part for part in parts if part[2] is not None]
        if given and self.weight is None:
            raise ConfigError(
                f"`weights` must be None for metric `{self.metric}`, whose `update` takes none, "
                "but are given. Use a metric that weights rows, such as `MeanMetric` of one value "
                "per row."
            )
        if given and len(given) != len(parts):
            raise ConfigError(
                f"`weights` must be given for all {len(parts)} devices that have rows or for none, "
                f"but are given for {len(given)}."
            )
        if self.weight is not None and any(
            is_scalar(outputs) and weights is None and num_rows(labels) is None
            for outputs, labels, weights in parts
        ):
            raise ConfigError(
                "`weights` must say how many rows a device's one number stands for in metric "
                f"`{self.metric}`, but are None, and no labels say it. Give each row a weight of 1."
            )

    def weighted(self, part: Part) -> Part:
        """Let one number weigh as much as the rows that it stands for."""
        outputs, labels, weights = part
        if self.weight is None or not is_scalar(outputs):
            return part
        rows = outputs.new_tensor(num_rows(labels)) if weights is None else weights.sum()
        return outputs, labels, rows

    # Any: what torchmetrics takes.
    def call(self, update: Callable[..., Any], part: Part) -> None:
        """Call ``update`` with what it takes of ``part``."""
        outputs, labels, weights = self.weighted(part)
        if self.takes_lists:
            outputs = outputs if isinstance(outputs, list) else [outputs]
            labels = labels if isinstance(labels, list) else [] if labels is None else [labels]
        given = (outputs, labels) if self.takes_labels and labels is not None else (outputs,)
        if self.labels_first:
            given = given[::-1]
        if self.weight is None or weights is None:
            update(*given)
        else:
            update(*given, **{self.weight: self._shaped(weights, outputs)})

    def _shaped(self, weights: Tensor, outputs: Nested) -> Tensor:
        """Let one weight per row stand for all of the row's elements, where shapes broadcast."""
        if not (self.broadcasts and isinstance(outputs, Tensor) and weights.dim() == 1):
            return weights
        return weights.view(-1, *[1] * (outputs.dim() - 1))


# Any: a metric, or what has an `update` like one.
def _parameters(metric: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(metric.update).parameters.values())


def _begins_with_labels(positions: Sequence[inspect.Parameter]) -> bool:
    names = [each.name in _LABEL_NAMES for each in positions[:2]]
    return names == [True, False]


class MetricAccumulator:
    """One metric, and the copies on which the parts of a batch are counted.

    Nothing of a batch is in ``total`` before :meth:`settle`.

    Args:
        total: What everything is counted into, on the device where it lies.
        owned: Nobody else knows this object, so that another one may take its place; then
            everything that can fail has failed before :meth:`settle`.

    Attributes:
        counted: Whether a batch was settled here, or the total came with some. `update_called` of
            a metric with others inside stays False.

    Determinism: parts are added in their order, whoever has counted them and when.
    """

    def __init__(self, total: Metric, *, owned: bool = False) -> None:
        self.total = total
        self.counted = bool(total.update_called)
        self._owned = owned
        self._arguments = Arguments.of(total)
        self._merges = obstacle_to_merging(total) is None
        self._copies: list[Metric] = []
        self._settle: Callable[[], object] | None = None

    def open(self, parts: Sequence[Part]) -> None:
        """Prepare for a batch of ``parts``; what was left of a failed one is forgotten.

        Raises:
            ConfigError: The metric cannot count them.
        """
        self._settle = None
        if self._owned and parts:
            move(self.total, device_of(parts[0], self.total.device))
        self._arguments.check(parts)
        if self._merges:
            self._copies += [fresh(self.total) for _ in range(len(self._copies), len(parts))]
            for metric in self._copies:
                metric.reset()

    def update(self, place: int, part: Part) -> None:
        """Count the part number ``place`` by itself, where its outputs lie; in any thread."""
        if self._merges:
            metric, device = self._copies[place], device_of(part, self.total.device)
            move(metric, device)
            outputs, labels, weights = part
            here = outputs, moved(labels, device), moved(weights, device)
            with torch.no_grad():
                self._arguments.call(metric.update, here)

    def close(self, parts: Sequence[Part], dims: tuple[int, int] = (0, 0)) -> None:
        """Do what is left when all parts are counted.

        Args:
            dims: Those of rows in outputs and in labels.
        """
        if self._merges and parts:
            self._settle = lambda: self._absorb(len(parts))
        elif parts:
            weighted = [self._arguments.weighted(part) for part in parts]
            whole = gather(weighted, dims, self.total.device)
            if self._owned:
                successor = _successor(self.total)
                self._count(successor, whole)
                self._settle = lambda: setattr(self, "total", successor)
            else:
                self._settle = lambda: self._count(self.total, whole)

    def keep(self) -> Callable[[], None] | None:
        """Return what puts the total back, where :meth:`settle` may fail halfway; else None."""
        merges_plainly = self._merges and type(self.total).merge_state is Metric.merge_state
        return None if merges_plainly else _keep(self.total)

    def settle(self) -> None:
        """Add the batch to the total, once; nothing when it was not closed."""
        if self._settle is not None:
            with torch.no_grad():
                self._settle()
            self._settle, self.counted = None, True

    def _absorb(self, num_parts: int) -> None:
        for metric in self._copies[:num_parts]:
            _absorb(self.total, metric)

    def _count(self, metric: Metric, whole: Part) -> None:
        with torch.no_grad():
            self._arguments.call(metric.update, whole)


def fresh(metric: Metric) -> Metric:
    """Return a copy that has counted nothing; what ``metric`` has counted is not copied first."""
    memo: dict[int, Any] = {}
    if not any(isinstance(child, Metric) and child is not metric for child in metric.modules()):
        # Of one with metrics inside, a state may be the inner one's default: that must be copied.
        memo = {
            id(state): [] if isinstance(state, list) else torch.empty_like(state)
            for state in metric.metric_state.values()
        }
    new = copy.deepcopy(metric, memo)
    new.reset()
    return new


def move(metric: Metric, device: torch.device) -> None:
    """Move all that ``metric`` holds; its dtype stays, which torchmetrics' own `to` forgets."""
    if metric.device != device:
        dtype = metric.dtype
        metric.to(device)
        metric._dtype = dtype


def _successor(metric: Metric) -> Metric:
    """Return a copy that has counted the same; rows in lists are not copied."""
    lists = [state for state in metric.metric_state.values() if isinstance(state, list)]
    return copy.deepcopy(metric, {id(state): list(state) for state in lists})


def _keep(metric: Metric) -> Callable[[], None]:
    """Return a function that gives ``metric``, and all inside it, what it has counted until now."""
    lists = [state for state in metric.metric_state.values() if isinstance(state, list)]
    memo: dict[int, Any] = {id(state): list(state) for state in lists}
    memo.update({id(parameter): parameter for parameter in metric.parameters()})
    kept = list(copy.deepcopy(metric, memo).modules())
    own = [(each, dict(each._modules)) for each in metric.modules()]

    def restore() -> None:
        for (each, children), old in zip(own, kept, strict=True):
            # Children stay the objects they are; `update` and `compute` are bound to their object.
            mine = {key: vars(each)[key] for key in _BOUND if key in vars(each)}
            each.__dict__.clear()
            each.__dict__.update({**vars(old), **mine, "_modules": children})

    return restore


def _absorb(total: Metric, part: Metric) -> None:
    """Add what ``part`` has counted to ``total``, which comes first."""
    if type(total).merge_state is not Metric.merge_state:
        move(part, total.device)
        total.merge_state(part)
        total._computed = None
        return
    for name, rule in total._reductions.items():
        lists_at = "cpu" if total.compute_on_cpu else total.device
        own, other = getattr(total, name), getattr(part, name)
        if isinstance(other, list):
            other = [each.to(lists_at) for each in other]
        else:
            other = other.to(own.device if isinstance(own, Tensor) else lists_at)
        setattr(total, name, _RULES[rule](own, other))
    for name, value in _own_attributes(part).items():
        total.__dict__[name] = value
    total._computed = None
    total._update_count += part.update_count


# Any: whatever the metric's author keeps.
def _own_attributes(metric: Metric) -> dict[str, Any]:
    """Return what an update may set beside states, such as the dtype of what it was given."""
    plain = (bool, int, float, str, type(None), torch.dtype)
    return {
        name: value
        for name, value in vars(metric).items()
        if name not in metric._defaults
        and name not in vars(Metric)
        and not name.startswith("_")
        and isinstance(value, plain)
    }
