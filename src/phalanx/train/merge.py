"""What several workers found for one step, merged into what one worker would have found.

Shape legend: k updates; * the shape of one gradient.

    worker 0   g₀ of w₀ samples ──× w₀ ──┐
    worker 1   g₁ of w₁ samples ──× w₁ ──┼─ Σ ── / (w₀ + w₁ + w₂) ──▶ g of all samples
    worker 2   g₂ of w₂ samples ──× w₂ ──┘

# Note [Weights and overflow]
Both usual ways have a fault. Σ w·g / Σ w overflows: ten thousand samples times a float16 gradient
of 10 is no float16. Σ (w / Σ w)·g rounds every share, so the mean of equal gradients need not equal
them. Here weights are reduced to the smallest whole numbers in the same proportion, and divided by
a power of two, which is exact and leaves no product larger than its gradient; the sum is divided
once, at its end:

    Σ (w / 2ᵉ)·g  /  (Σ w / 2ᵉ)        2ᵉ ≥ Σ w > 2ᵉ⁻¹

in float64, whatever the gradients are, which then get their own dtype back. Weights are added and
reduced without rounding, so they may be as large as anybody likes, and only proportions count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan import Node, SummationTree, flatten, leaf_paths, unflatten

__all__ = ["Update", "merge_updates"]

Weight: TypeAlias = int | float | Fraction


@dataclass(frozen=True, eq=False, repr=False)
class Update:
    """What one worker found in its samples; two updates are equal if they are the same object.

    Args:
        gradients: Of the **mean** loss over the samples, or the weighted mean if they have
            weights: a tensor, an array, a number, or these nested in lists, tuples or dicts. None
            stands for a gradient of zero, as in ``parameter.grad``.
        loss: That mean: a number, or a tensor of one element.
        samples: How many samples these are, a whole number ≥ 0 of any size.
        weight: What the mean stands for, if it is not the number of samples: tokens, say, or the
            sum of sample weights. A finite number ≥ 0; a `Fraction` is taken as exactly as a whole
            number.
        rank: The worker's place in the order of summation; see :func:`merge_updates`.

    Raises:
        ConfigError: ``samples`` is no whole number or negative; ``weight`` is NaN, infinite or
            negative, or above 0 without samples; ``rank`` is no whole number.

    Example:
        >>> Update([0.5, -1.0], loss=0.25, samples=8)
        Update(list, loss=0.25, samples=8)
        >>> Update([0.5, -1.0], loss=0.25, samples=8, weight=231, rank=1).stands_for
        231

    Source: ``WorkerUpdate`` of oxirs-embed, whose gradients were flat lists and whose counts were
    32-bit.
    """

    gradients: Any  # any of the containers above
    loss: float | Tensor
    samples: int
    weight: Weight | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        samples = _whole("samples", self.samples)
        if samples < 0:
            raise ConfigError(f"`samples` must be at least 0, but is {samples!r}.")
        object.__setattr__(self, "samples", samples)
        if self.rank is not None:
            object.__setattr__(self, "rank", _whole("rank", self.rank))
        if self.weight is None:
            return
        weight = _number(self.weight)
        if weight is None or weight < 0 or not _is_finite(weight):
            raise ConfigError(
                f"`weight` must be a finite number of at least 0, but is {self.weight!r}."
            )
        if weight and not samples:
            raise ConfigError(
                f"`weight` must be 0 where `samples` is 0, but is {weight!r}. Give the number of "
                "samples that it stands for."
            )
        object.__setattr__(self, "weight", weight)

    @property
    def stands_for(self) -> Weight:
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
    """Average gradients and losses, each weighted by what it stands for.

    If each update is of the mean loss over its samples, the merged one is of the mean loss over all
    samples, however unevenly they were split. A merged update can be merged again.

    An update that stands for nothing changes no bit: only its ``samples`` are looked at, its
    gradients may be None, empty or NaN. Gradients themselves are not searched for NaN: what one of
    them holds the merged one holds, as in DDP, so that a gradient scaler sees it.

    Shapes:
        gradients [*] of a floating or complex dtype, alike in all updates -> gradients [*] of the
        same dtype on the same device, in new memory and without a graph, in the same containers
        (mappings become dicts in the order of the first one's keys; numbers become floats). A
        gradient of None counts as zeros, and is None if it is None in all updates.

    Args:
        updates: At least one, and together they must stand for something.

    Returns:
        An update with the mean gradients, the mean loss as a float, the sum of all ``samples``,
        and the sum of weights unless nobody has one. It has no rank.

    Raises:
        ConfigError: There are no updates, or the sum of weights is 0; gradients differ in their
            containers, keys, lengths, shapes, dtypes or devices, or are tensors of integers; a loss
            is no number or not finite; some updates have a rank and some have none. Nothing is
            computed then.
        UnsupportedError: A gradient is sparse.

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
        ([1.0, 4.0], 3.0, 11, 3)

    Determinism: the loss is the exact mean, rounded once. Gradients are computed in float64
    (complex128; on MPS, which has none, float32) and added along the tree of ``phalanx.plan`` in
    the order of ranks, or as given where there are none; equal ranks stay as given. So updates with
    ranks of their own make the same bits in any order. Without ranks, orders differ by float64
    rounding: within 2·(⌈log₂ k⌉ + 1)·2⁻⁵³ of the largest gradient, subnormal numbers aside, which
    float32 results seldom show. Where the weights' proportions are small whole numbers, and
    products and sums fit float64, as with float32 gradients of like size, only the division rounds.
    Source: ``merge_worker_updates`` of oxirs-embed's DataParallelTrainer, without its 32-bit total
    and its padding of short gradients with zeros.
    """
    given = _checked(updates)
    counted = [pair for pair in given if pair[1].stands_for]
    if not counted:
        raise ConfigError(
            f"`updates` must stand for something together, but all {len(given)} have weight 0. "
            "Leave the step out."
        )
    losses = [Fraction(_loss(index, update)) for index, update in counted]
    weights = [Fraction(update.stands_for) for _, update in counted]
    columns, close = _columns([(index, update.gradients) for index, update in counted])
    means = _means(columns, *_scales(weights))
    total = sum(weights, Fraction(0))
    loss = sum(map(operator.mul, weights, losses), Fraction(0)) / total
    plain = all(update.weight is None for _, update in given)
    samples = sum(update.samples for _, update in given)
    return Update(close(means), float(loss), samples, None if plain else _shortest(total))


def _checked(updates: Iterable[Update]) -> list[tuple[int, Update]]:
    """Return the updates in the order of ranks, with their places in the order given."""
    given = list(updates)
    if not given:
        raise ConfigError("`updates` must hold at least one update, but is empty.")
    for index, update in enumerate(given):
        if not isinstance(update, Update):
            raise ConfigError(
                f"`updates` must hold objects of `Update`, but update {index} is "
                f"{type(update).__name__!r}."
            )
    ranks = [update.rank for update in given if update.rank is not None]
    if ranks and len(ranks) < len(given):
        missing = next(index for index, update in enumerate(given) if update.rank is None)
        raise ConfigError(
            f"`rank` must be given for all updates or for none, but is None for update {missing}."
        )
    pairs = list(enumerate(given))
    return sorted(pairs, key=lambda pair: pair[1].rank or 0)


def _loss(index: int, update: Update) -> Weight:
    loss = _number(update.loss)
    if loss is None:
        raise ConfigError(
            f"`loss` of update {index} must be a number or a tensor of one element, but is "
            f"{update.loss!r}. Take its mean."
        )
    if not _is_finite(loss):
        raise ConfigError(
            f"`loss` of update {index} must be finite, but is {loss!r}. Leave that update out to "
            "go on with the others."
        )
    return loss


def _scales(weights: Sequence[Fraction]) -> tuple[list[float], float]:
    """Return weights and their sum, reduced; see Note [Weights and overflow]."""
    denominator = math.lcm(*(weight.denominator for weight in weights))
    wholes = [int(weight * denominator) for weight in weights]
    divisor = math.gcd(*wholes)
    wholes = [whole // divisor for whole in wholes]
    power = 1 << (sum(wholes) - 1).bit_length()
    return [whole / power for whole in wholes], sum(wholes) / power


def _shortest(total: Fraction) -> Weight:
    """Return a sum of weights as a whole number or a float, where it fits one."""
    if total.denominator == 1:
        return int(total)
    return float(total) if total < 2**1000 else total


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"`{name}` must be a whole number, but is {value!r}.") from None


def _number(value: Any) -> Weight | None:
    """Return the number that ``value`` is or holds, or None where it is none."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.item() if value.size == 1 else None
    return value if isinstance(value, (int, float, Fraction)) else None


def _is_finite(value: Weight) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


# --- gradients as columns: the same leaf of every update ------------------------------------------

# Tensors, arrays or numbers, all of one kind, and None where an update has no such gradient.
Column: TypeAlias = tuple[Any, ...]
Placed: TypeAlias = tuple[int, Any]  # an update's place, for errors, and something of that update


def _columns(gradients: Sequence[Placed]) -> tuple[list[Column], Callable[[list[Any]], Any]]:
    """Return the columns of ``gradients``, and what puts one leaf for each into the containers."""
    first_place, first = gradients[0]
    if all(_is_flat(each) for _, each in gradients):
        # A million numbers are one leaf here, rather than a million.
        for place, each in gradients:
            if len(each) != len(first):
                raise ConfigError(
                    f"Gradients of update {place} must hold {len(first)} numbers like those of "
                    f"update {first_place}, but hold {len(each)}."
                )
        column = tuple(np.array(each, dtype=np.float64) for _, each in gradients)
        return [column], lambda means: type(first)(means[0].tolist())
    if isinstance(first, Mapping):
        gradients = [(place, _in_order_of(first, each)) for place, each in gradients]
        first = gradients[0][1]
    places = [place for place, _ in gradients]
    opened = [flatten(each) for _, each in gradients]
    spec = opened[0][1]
    for (place, each), (_, other) in zip(gradients, opened, strict=True):
        if other != spec:
            _refuse_structure(place, each, first_place, first)
    columns = list(zip(*(leaves for leaves, _ in opened), strict=True))
    for path, column in zip(leaf_paths(first), columns, strict=True):
        _check_column(path, list(zip(places, column, strict=True)))
    return columns, lambda means: unflatten(means, spec)


def _is_flat(value: Any) -> bool:
    """Tell whether ``value`` is a list or tuple of numbers and nothing else."""
    kinds = set(map(type, value)) if type(value) in (list, tuple) else {object}
    return all(issubclass(kind, Real) for kind in kinds)


def _in_order_of(first: Any, other: Any) -> Any:
    """Return mappings as dicts, in the first one's order if they have the same keys."""
    if not isinstance(other, Mapping):
        return other
    if not isinstance(first, Mapping) or other.keys() != first.keys():
        return dict(other)
    return {key: _in_order_of(first[key], other[key]) for key in first}


def _refuse_structure(place: int, other: Any, first_place: int, first: Any) -> None:
    paths, first_paths = dict.fromkeys(leaf_paths(other)), dict.fromkeys(leaf_paths(first))
    lacking = [f"lack `{path}`" for path in first_paths if path not in paths]
    extra = [f"have `{path}` too" for path in paths if path not in first_paths]
    told = " and ".join(lacking[:1] + extra[:1])
    if type(other) is not type(first):
        told = f"are a {type(other).__name__}"
    raise ConfigError(
        f"Gradients of update {place} must stand in the same containers as those of update "
        f"{first_place}, a {type(first).__name__}, but {told or 'differ in kind or order inside'}. "
        "Give None for a gradient of zero."
    )


def _check_column(path: str, column: Sequence[Placed]) -> None:
    """Refuse leaves that cannot be averaged; None is one that can."""
    named = f"Gradient `{path}`" if path else "Gradient"
    present = [(place, leaf) for place, leaf in column if leaf is not None]
    kinds = [_kind(f"{named} of update {place}", leaf) for place, leaf in present]
    for (place, _), kind in zip(present, kinds, strict=True):
        if kind != kinds[0]:
            raise ConfigError(
                f"{named} of update {place} must be like that of update {present[0][0]}, "
                f"{kinds[0]}, but is {kind}."
            )


def _kind(named: str, leaf: Any) -> str:
    """Tell what two leaves must have in common, in words."""
    if isinstance(leaf, Real):
        return "a number"
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise UnsupportedError(f"{named} must be dense, but is {leaf.layout}. Give to_dense().")
        averages = leaf.is_floating_point() or leaf.is_complex()
        told = f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}, on {leaf.device}"
    elif isinstance(leaf, np.ndarray):
        averages = leaf.dtype.kind in "fc" and leaf.dtype.itemsize <= _wide(leaf).itemsize
        told = f"an array of shape {leaf.shape}, {leaf.dtype}"
    else:
        averages, told = False, repr(type(leaf).__name__)
    if not averages:
        raise ConfigError(
            f"{named} must be a number, or a tensor or array of a floating dtype up to 64 bits, "
            f"but is {told}."
        )
    return told


# --- the mean of a column -------------------------------------------------------------------------


def _means(columns: Sequence[Column], scales: Sequence[float], whole: float) -> list[Any]:
    tree = SummationTree(len(scales))
    means = []
    with np.errstate(invalid="ignore"):  # torch does not warn of inf - inf either
        for column in columns:
            mean = _sum(column, scales, tree, tree.root)
            if mean is not None:
                mean /= whole
                mean = _narrowed(mean, next(leaf for leaf in column if leaf is not None))
            means.append(mean)
    return means


def _sum(column: Column, scales: Sequence[float], tree: SummationTree, node: Node) -> Any:
    """Return the sum below ``node`` in new memory; None where all leaves below it are."""
    if node.level == 0:
        leaf = column[node.index]
        if leaf is None:
            return None
        product = _widened(leaf)
        product *= scales[node.index]
        return product
    child = Node(node.level - 1, 2 * node.index)
    left = _sum(column, scales, tree, child)
    sibling = tree.sibling(child)
    right = None if sibling is None else _sum(column, scales, tree, sibling)
    if left is None or right is None:
        return right if left is None else left
    left += right
    return left


def _wide(leaf: Any) -> Any:
    """Return the dtype that a tensor's or an array's mean is computed in."""
    if isinstance(leaf, np.ndarray):
        return np.dtype(np.complex128 if leaf.dtype.kind == "c" else np.float64)
    if leaf.device.type == "mps":  # has no 64-bit numbers
        return torch.complex64 if leaf.is_complex() else torch.float32
    return torch.complex128 if leaf.is_complex() else torch.float64


def _widened(leaf: Any) -> Any:
    """Return a wide copy."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to(_wide(leaf), copy=True)
    return leaf.astype(_wide(leaf)) if isinstance(leaf, np.ndarray) else float(leaf)


def _narrowed(mean: Any, like: Any) -> Any:
    if isinstance(like, Tensor):
        return mean.to(like.dtype)
    return mean.astype(like.dtype, copy=False) if isinstance(like, np.ndarray) else mean
