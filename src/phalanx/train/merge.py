"""The updates of several workers for one step, merged into the one of all their samples.

    worker 0   g₀ of w₀ samples ──× w₀ ──┐
    worker 1   g₁ of w₁ samples ──× w₁ ──┼─ Σ in float64 ── / (w₀ + w₁ + w₂) ──▶ g of all samples
    worker 2   g₂ of w₂ samples ──× w₂ ──┘

Shape legend: * the shape of one gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import flatten, leaf_paths, read_count, read_whole, unflatten

__all__ = ["Update", "merge_updates"]


@dataclass(frozen=True, eq=False, repr=False)
class Update:
    """The gradients and the loss of one worker's samples.

    Args:
        gradients: Of the **mean** loss over the samples, or the weighted mean if they have
            weights: a tensor, an array, a number, or these nested in lists, tuples or dicts. None
            stands for a gradient of zero, as in ``parameter.grad``.
        loss: That mean: a number, or a tensor of one element.
        samples: How many samples these are, a whole number ≥ 0.
        weight: The weight of the mean, if it is not the number of samples: tokens, say, or the sum
            of sample weights. A finite number ≥ 0.
        rank: The worker's place in the order of summation; see :func:`merge_updates`.

    Raises:
        ConfigError: ``samples`` is no whole number or negative; ``weight`` is NaN, infinite or
            negative, or above 0 without samples; ``rank`` is no whole number.

    Example:
        >>> Update([0.5, -1.0], loss=0.25, samples=8)
        Update(list, loss=0.25, samples=8)

    Source: ``WorkerUpdate`` of oxirs-embed, whose gradients were flat lists and whose counts were
    32-bit.
    """

    gradients: Any  # any of the containers above
    loss: float | Tensor
    samples: int
    weight: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", read_count("samples", self.samples, 0))
        if self.rank is not None:
            object.__setattr__(self, "rank", read_whole("rank", self.rank))
        if self.weight is not None:
            weight = _number(self.weight)
            if not (0 <= weight < math.inf) or (weight and not self.samples):
                raise ConfigError(
                    "`weight` must be a finite number of at least 0, and 0 where there are no "
                    f"samples, but is {self.weight!r:.80} for {self.samples} samples."
                )
            object.__setattr__(self, "weight", weight)

    @property
    def stands_for(self) -> float:
        """The weight, or the number of samples where none was given."""
        return self.samples if self.weight is None else self.weight

    def __repr__(self) -> str:
        told = [type(self.gradients).__name__, f"loss={self.loss!r}", f"samples={self.samples}"]
        told += [
            f"{name}={value!r}"
            for name, value in (("weight", self.weight), ("rank", self.rank))
            if value is not None
        ]
        return f"Update({', '.join(told)})"


def merge_updates(updates: Iterable[Update]) -> Update:
    """Average gradients and losses, each weighted by its samples or its weight.

    If each update is of the mean loss over its samples, the merged one is of the mean loss over all
    samples, however unevenly they were split. A merged update can be merged again.

    The gradients and the loss of an update of weight 0 are not looked at. Gradients are not
    searched for NaN: the merged one holds it, as in DDP, so that a gradient scaler sees it.

    Shapes:
        gradients [*] of a floating or complex dtype, alike in all updates -> gradients [*] of the
        same dtype on the same device, in new memory and without a graph, in the same containers;
        numbers become floats. A gradient of None counts as zeros, and is None if it is None in all
        updates.

    Args:
        updates: At least one, and one of them must have a weight above 0.

    Returns:
        An update with the mean gradients, the mean loss as a float, the sum of all ``samples``,
        and the sum of weights unless nobody has one. It has no rank.

    Raises:
        ConfigError: There are no updates, or the sum of weights is 0; gradients differ in their
            containers, shapes, dtypes or devices, or are of integers; a loss is no finite number.

    Example:
        >>> merge_updates([Update([4.0], 2.0, samples=1), Update([0.0], 0.0, samples=3)])
        Update(list, loss=0.5, samples=4)
        >>> import torch
        >>> mean = merge_updates(
        ...     [
        ...         Update({"w": torch.tensor([3.0, 0.0])}, 1.0, samples=2, weight=1),
        ...         Update({"w": torch.tensor([0.0, 6.0])}, 4.0, samples=9, weight=2),
        ...     ]
        ... )
        >>> mean.gradients["w"].tolist(), mean.loss, mean.samples, mean.weight
        ([1.0, 4.0], 3.0, 11, 3.0)

    Determinism: computed in float64 (complex128), one after another in the order of ranks, or as
    given where there are none. Updates with ranks are bitwise the same in any order; others within
    float64 rounding.
    Source: ``merge_worker_updates`` of oxirs-embed's DataParallelTrainer, without its 32-bit total
    and its padding of short gradients with zeros.
    """
    given = list(updates)
    for index, update in enumerate(given):
        if not isinstance(update, Update):
            raise ConfigError(
                f"`updates` must hold objects of `Update`, but update {index} is "
                f"{type(update).__name__!r}."
            )
    order = sorted(range(len(given)), key=lambda index: given[index].rank or 0)
    counted = [(index, given[index]) for index in order if given[index].stands_for]
    if not counted:
        raise ConfigError(
            f"`updates` must have a weight above 0 together, but all {len(given)} have weight 0. "
            "Leave the step out."
        )
    weights = [float(update.stands_for) for _, update in counted]
    total = math.fsum(weights)
    losses = [weight * _loss(*pair) for weight, pair in zip(weights, counted, strict=True)]
    gradients = _mean([(index, update.gradients) for index, update in counted], weights, total)
    samples = sum(update.samples for update in given)
    plain = all(update.weight is None for update in given)
    return Update(gradients, math.fsum(losses) / total, samples, None if plain else total)


def _loss(index: int, update: Update) -> float:
    loss = _number(update.loss)
    if not math.isfinite(loss):
        raise ConfigError(
            f"`loss` of update {index} must be a finite number, but is {update.loss!r:.80}. Leave "
            "that update out to continue with the others."
        )
    return loss


# Any, here and below: what the user gives, and the leaves of gradients.
def _number(value: Any) -> float:
    """Return the number that ``value`` is or holds; NaN where it is none."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def _mean(gradients: Sequence[tuple[int, Any]], weights: Sequence[float], total: float) -> Any:
    first_place, first = gradients[0]
    flat = [flatten(each) for _, each in gradients]
    for (place, _), (_, spec) in zip(gradients, flat, strict=True):
        if spec != flat[0][1]:
            raise ConfigError(
                f"Gradients of update {place} must stand in the same containers as those of update "
                f"{first_place}, {flat[0][1]!s:.120}, but stand in {spec!s:.120}. Give None for a "
                "gradient of zero."
            )
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    for path, column in zip(leaf_paths(first), columns, strict=True):
        kinds = [(place, _kind(leaf)) for (place, _), leaf in zip(gradients, column, strict=True)]
        _check_column(f"Gradient `{path}`" if path else "Gradient", kinds)
    return unflatten([_mean_leaf(column, weights, total) for column in columns], flat[0][1])


def _kind(leaf: Any) -> str | None:
    """Return the words for what leaves must have in common; None for a gradient of zero."""
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}, on {leaf.device}"
    if isinstance(leaf, np.ndarray):
        return f"an array of shape {leaf.shape}, {leaf.dtype}"
    is_number = isinstance(leaf, (int, float, np.number))
    return "a number" if is_number else f"of type {type(leaf).__name__!r}"


def _check_column(named: str, kinds: Sequence[tuple[int, str | None]]) -> None:
    present = [(place, kind) for place, kind in kinds if kind is not None]
    for place, kind in present:
        if kind != present[0][1]:
            raise ConfigError(
                f"{named} of update {place} must be like that of update {present[0][0]}, "
                f"{present[0][1]}, but is {kind}."
            )
        if kind != "a number" and "float" not in kind and "complex" not in kind:
            raise ConfigError(
                f"{named} must be a number, or a tensor or array of a floating dtype, but is "
                f"{kind}."
            )


def _mean_leaf(column: Sequence[Any], weights: Sequence[float], total: float) -> Any:
    pairs = [pair for pair in zip(column, weights, strict=True) if pair[0] is not None]
    if not pairs:
        return None
    first = pairs[0][0]
    if isinstance(first, Tensor):
        wide = torch.complex128 if first.is_complex() else torch.float64
        terms = [leaf.detach().to(wide) * weight for leaf, weight in pairs]
        return (sum(terms[1:], terms[0]) / total).to(first.dtype)
    if isinstance(first, np.ndarray):
        width = np.complex128 if first.dtype.kind == "c" else np.float64
        with np.errstate(invalid="ignore"):  # torch does not warn of inf - inf either
            arrays = [leaf.astype(width) * weight for leaf, weight in pairs]
            return np.asarray(sum(arrays[1:], arrays[0]) / total).astype(first.dtype)
    return sum(float(leaf) * weight for leaf, weight in pairs) / total
