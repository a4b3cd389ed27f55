"""One step over several workers of the user's own: its samples split, and their updates merged.

A `Trainer` uses nothing of this; see `train/step.py` for its step.

    samples 0 3 6 ─ worker 0 ─ g₀ of w₀ samples ─× w₀ ─┐
    samples 1 4   ─ worker 1 ─ g₁ of w₁ samples ─× w₁ ─┼─ Σ in float64 ─ / (w₀ + w₁ + w₂) ─▶ g
    samples 2 5   ─ worker 2 ─ g₂ of w₂ samples ─× w₂ ─┘

Shape legend: B samples; k workers; * the shape of one gradient, or whatever else a sample has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import flatten, leaf_paths, read_count, read_whole, unflatten

__all__ = ["Update", "merge_updates", "split_batch"]


# Any, here and below: samples and gradients are whatever the user has.
def split_batch(samples: Any, n_workers: int) -> list[Any]:
    """Deal samples out in turn: sample i goes to worker i mod ``n_workers``.

    There are always ``n_workers`` parts. More workers than samples leave the last parts empty; so
    do no samples at all.

    Args:
        samples: One batch: a tensor, an array, or these in a dict, list, tuple or dataclass; each
            is cut along dim 0. Or a sequence of samples: what has a length and can be indexed, and
            whose first item is no tensor and no array.
        n_workers: k, at least 1.

    Shapes:
        tensors and arrays [B, *] of any dtype -> k parts [b, *]; the sizes b are B together and
        differ by at most one.

    Returns:
        For each worker a batch like ``samples``, or some samples: a list, tuple or range if
        ``samples`` is one, else a list.

    Raises:
        ConfigError: ``n_workers`` is less than 1, or leaves of a batch differ in B or are no
            tensors.

    Example:
        >>> split_batch(["a", "b", "c", "d", "e"], 2)
        [['a', 'c', 'e'], ['b', 'd']]
        >>> parts = split_batch({"x": torch.ones(5, 4), "y": torch.arange(5)}, 2)
        >>> [(tuple(part["x"].shape), part["y"].tolist()) for part in parts]
        [((3, 4), [0, 2, 4]), ((2, 4), [1, 3])]

    Determinism: who gets what depends on B and k alone. Nothing is copied: parts of tensors and
    arrays are views, and samples are the same objects.
    Source: ``split_batch`` of oxirs-embed's DataParallelTrainer, which gave no parts for no
    samples.
    """
    workers = read_count("n_workers", n_workers, 1)
    if _is_batch(samples):
        leaves, spec = flatten(samples)
        picks = _picks(_num_rows(samples, leaves), workers)
        return [unflatten([leaf[pick] for leaf in leaves], spec) for pick in picks]
    picks = _picks(len(samples), workers)
    if isinstance(samples, (list, tuple, range)):
        return [samples[pick] for pick in picks]
    return [[samples[index] for index in range(len(samples))[pick]] for pick in picks]


def _picks(total: int, workers: int) -> list[slice]:
    """Return which of ``total`` samples each worker gets."""
    return [slice(worker, total, workers) for worker in range(workers)]


def _is_batch(samples: Any) -> bool:
    if isinstance(samples, (list, tuple)):
        return bool(samples) and _is_array(samples[0])
    is_record = dataclasses.is_dataclass(samples)
    return _is_array(samples) or isinstance(samples, Mapping) or is_record


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _num_rows(samples: Any, leaves: Sequence[Any]) -> int:
    """Return B, the same for all leaves."""
    sizes = [len(leaf) if _is_array(leaf) and leaf.ndim else -1 for leaf in leaves]
    for path, size in zip(leaf_paths(samples), sizes, strict=True):
        if size != sizes[0] or size < 0:
            raise ConfigError(
                f"Leaf `{path}` of `samples` must be a tensor or array with as many rows along "
                f"dim 0 as the first ({sizes[0]}), but is another. Give values that are not per "
                "sample to workers by themselves."
            )
    if not sizes:
        raise ConfigError(f"`samples` must hold a tensor to be cut, but is {samples!r:.80}.")
    return sizes[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The gradients and the loss of one worker's samples.

    Args:
        gradients: Of the **mean** loss over the samples, or the weighted mean if they have
            weights: a tensor, a number, or these nested in lists, tuples or dicts. None stands for
            a gradient of zero, as in ``parameter.grad``.
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
        Update(loss=0.25, samples=8, weight=None, rank=None)

    Source: ``WorkerUpdate`` of oxirs-embed, whose gradients were flat lists and whose counts were
    32-bit.
    """

    gradients: Any = dataclasses.field(repr=False)
    loss: float | Tensor
    samples: int
    weight: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", read_count("samples", self.samples, 0))
        if self.rank is not None:
            object.__setattr__(self, "rank", read_whole("rank", self.rank))
        if self.weight is not None:
            weight = float(self.weight)
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
        >>> merged = merge_updates(
        ...     [
        ...         Update({"w": torch.tensor([3.0, 0.0])}, 1.0, samples=2, weight=1),
        ...         Update({"w": torch.tensor([0.0, 6.0])}, 4.0, samples=9, weight=2),
        ...     ]
        ... )
        >>> merged.gradients["w"].tolist(), merged.loss, merged.samples, merged.weight
        ([1.0, 4.0], 3.0, 11, 3.0)

    Determinism: computed in float64 (complex128), one after another in the order of ranks, or as
    given where there are none. Updates with ranks are bitwise the same in any order; others within
    float64 rounding.
    Source: ``merge_worker_updates`` of oxirs-embed's DataParallelTrainer, without its 32-bit total
    and its padding of short gradients with zeros.
    """
    given = list(updates)
    in_order = sorted(enumerate(given), key=lambda pair: pair[1].rank or 0)
    counted = [(index, update) for index, update in in_order if update.stands_for]
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
    loss = float(update.loss.detach() if isinstance(update.loss, Tensor) else update.loss)
    if not math.isfinite(loss):
        raise ConfigError(
            f"`loss` of update {index} must be a finite number, but is {update.loss!r:.80}. Leave "
            "that update out to continue with the others."
        )
    return loss


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
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    means = [
        _mean_leaf(path, column, weights, total)
        for path, column in zip(leaf_paths(first), columns, strict=True)
    ]
    return unflatten(means, flat[0][1])


def _mean_leaf(path: str, column: Sequence[Any], weights: Sequence[float], total: float) -> Any:
    pairs = [pair for pair in zip(column, weights, strict=True) if pair[0] is not None]
    if not pairs:
        return None
    kinds = list(dict.fromkeys(_kind(leaf) for leaf, _ in pairs))
    if len(kinds) > 1 or not ("float" in kinds[0] or "complex" in kinds[0]):
        raise ConfigError(
            f"Gradient `{path}` must be a number, or a tensor of one floating dtype and shape, in "
            f"all updates, but is {' and '.join(kinds)}."
        )
    first = pairs[0][0]
    if not isinstance(first, Tensor):
        return sum(float(leaf) * weight for leaf, weight in pairs) / total
    wide = torch.complex128 if first.is_complex() else torch.float64
    terms = [leaf.detach().to(wide) * weight for leaf, weight in pairs]
    return (sum(terms[1:], terms[0]) / total).to(first.dtype)


def _kind(leaf: Any) -> str:
    """Describe what a leaf must have in common with the others of its place."""
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}, on {leaf.device}"
    is_number = isinstance(leaf, (int, float, np.number))
    return "a float" if is_number else f"of type {type(leaf).__name__!r}"
