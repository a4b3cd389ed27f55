"""One batch for several workers: which of them gets which samples.

Shape legend: B samples; k workers; * whatever else a sample has.

    round_robin   worker 0: 0 3 6    worker 1: 1 4    worker 2: 2 5
    contiguous    worker 0: 0 1 2    worker 1: 3 4    worker 2: 5 6
    [2, 1, 0]     worker 0: 0 1 2 3 4    worker 1: 5 6    worker 2: –
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import equal_sizes, flatten, leaf_paths, unflatten, workload_sizes

__all__ = ["split_batch"]


# Any: samples are whatever the user has, and so are their parts.
def split_batch(
    samples: Any,
    n_workers: int,
    strategy: str | Sequence[float] = "round_robin",
    *,
    by: str | None = None,
) -> list[Any]:
    """Deal samples out: each goes to one worker, and nobody's are out of order.

    There are always ``n_workers`` parts. More workers than samples leave the last parts empty; so
    do no samples at all.

    Args:
        samples: One batch: a tensor, an array, or these in a dict, list, tuple or dataclass; each
            is cut along dim 0. Or any sequence of samples, whatever these are: what has a length
            and can be indexed.
        n_workers: k, at least 1.
        strategy: ``"round_robin"``: sample i goes to worker i mod k. ``"contiguous"``: neighbours
            stay together, and the first workers get one more where k does not divide B. Or one
            workload per worker: contiguous too, in these proportions (largest remainder).
        by: ``"rows"``: ``samples`` is a batch. ``"items"``: it is a sequence of samples. By
            default, lists and tuples that hold tensors or arrays, and nothing else but more of
            them in containers, are a batch. That leaves one case that must be said: lists of
            nothing but containers of tensors, such as pairs ``[(x0, y0), (x1, y1)]``.

    Shapes:
        tensors and arrays [B, *] of any dtype -> k parts [b, *]; the sizes b are B together and
        differ by at most one, or from the workloads' exact shares by less than one.

    Returns:
        For each worker a batch like ``samples``, or some samples: a list, tuple or range if
        ``samples`` is one, else a list.

    Raises:
        ConfigError: ``n_workers`` is less than 1; a strategy is unknown, or workloads are not one
            finite number ≥ 0 per worker with one above 0; leaves differ in B or cannot be cut;
            ``samples`` has no length; it may be either a batch or a sequence, and ``by`` is not
            given.

    Example:
        >>> split_batch(["a", "b", "c", "d", "e"], 2)
        [['a', 'c', 'e'], ['b', 'd']]
        >>> split_batch(range(5), 2, "contiguous")
        [range(0, 3), range(3, 5)]
        >>> import torch
        >>> parts = split_batch({"x": torch.ones(6, 4), "y": torch.arange(6)}, 3, [2, 1, 0])
        >>> [(tuple(part["x"].shape), part["y"].tolist()) for part in parts]
        [((4, 4), [0, 1, 2, 3]), ((2, 4), [4, 5]), ((0, 4), [])]

    Determinism: who gets what depends on B, k and the strategy alone. Nothing is copied: parts of
    tensors and arrays are views, and samples are the same objects.
    Source: ``split_batch`` of oxirs-embed's DataParallelTrainer, which knew round robin and gave no
    parts for no samples; the workloads are MXNet's.
    """
    workers = _checked_workers(n_workers)
    if _are_rows(samples, by):
        return _split_rows(samples, workers, strategy)
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        raise ConfigError(
            "`samples` must have a length and be indexable, or hold tensors, but is "
            f"{type(samples).__name__!r}. Give list(samples)."
        )
    picks = _picks(len(samples), workers, strategy)
    if isinstance(samples, (list, tuple, range)):
        return [samples[pick] for pick in picks]
    return [[samples[index] for index in range(len(samples))[pick]] for pick in picks]


def _split_rows(samples: Any, workers: int, strategy: str | Sequence[float]) -> list[Any]:
    if isinstance(samples, Mapping) and not isinstance(samples, dict):
        samples = dict(samples)  # what a tokenizer returns, say
    leaves, spec = flatten(samples)
    picks = _picks(_num_rows(samples, leaves), workers, strategy)
    return [unflatten([leaf[pick] for leaf in leaves], spec) for pick in picks]


def _picks(total: int, workers: int, strategy: str | Sequence[float]) -> list[slice]:
    """Return which of ``total`` samples each worker gets."""
    if isinstance(strategy, str):
        if strategy == "round_robin":
            return [slice(worker, total, workers) for worker in range(workers)]
        if strategy != "contiguous":
            raise ConfigError(
                "`strategy` must be 'round_robin', 'contiguous' or one workload per worker, but is "
                f"{strategy!r}."
            )
        sizes = equal_sizes(total, workers)
    else:
        sizes = workload_sizes(total, _checked_workloads(strategy, workers))
    stops = list(accumulate(sizes))
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _are_rows(samples: Any, by: str | None) -> bool:
    """Tell whether ``samples`` is one batch to be cut along dim 0."""
    if by not in (None, "rows", "items"):
        raise ConfigError(f"`by` must be 'rows', 'items' or None, but is {by!r}.")
    if by is not None:
        return by == "rows"
    if not isinstance(samples, (list, tuple)):
        return _is_array(samples) or isinstance(samples, Mapping) or _is_record(samples)
    if not samples or not _holds_arrays_only(samples):
        return False
    if not any(_is_array(each) for each in samples):
        raise ConfigError(
            f"`by` must say what `samples` is, a {type(samples).__name__} of {len(samples)} "
            "containers of tensors, but is None. Give by='items' to deal them out as samples, or "
            "by='rows' to cut each tensor along dim 0."
        )
    return True


def _holds_arrays_only(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value
    return all(
        _is_array(each) or (isinstance(each, (Mapping, list, tuple)) and _holds_arrays_only(each))
        for each in inner
    )


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _num_rows(samples: Any, leaves: Sequence[Any]) -> int:
    """Return B, the same for all leaves."""
    if not leaves:
        raise ConfigError(
            f"`samples` must hold a tensor to be cut, but is {samples!r}. Give by='items' for a "
            "sequence of samples."
        )
    for place, leaf in enumerate(leaves):
        if not _is_array(leaf) or not leaf.ndim:
            told = f"has shape {tuple(leaf.shape)}" if _is_array(leaf) else f"is {leaf!r}"
            raise ConfigError(
                f"Leaf {_named(samples, place)} of `samples` must be a tensor or array with a dim "
                f"0, but {told}. Give what is not per sample to workers by itself, or by='items' "
                "if `samples` is a sequence of samples."
            )
        if len(leaf) != len(leaves[0]):
            raise ConfigError(
                f"Leaf {_named(samples, place)} of `samples` must have {len(leaves[0])} rows along "
                f"dim 0 like {_named(samples, 0)}, but has {len(leaf)}. Give by='items' if "
                "`samples` is a sequence of samples."
            )
    return len(leaves[0])


def _named(samples: Any, place: int) -> str:
    return f"`{leaf_paths(samples)[place]}`"


def _checked_workers(n_workers: Any) -> int:
    try:
        workers = operator.index(n_workers)
    except TypeError:
        workers = 0
    if workers < 1:
        raise ConfigError(
            f"`n_workers` must be a whole number of at least 1, but is {n_workers!r}."
        )
    return workers


def _checked_workloads(strategy: Any, workers: int) -> list[float]:
    if _is_array(strategy):
        strategy = strategy.tolist()
    workloads = list(strategy) if isinstance(strategy, Iterable) else [strategy]
    if len(workloads) != workers:
        raise ConfigError(
            f"`strategy` must hold one workload per worker ({workers}), but is {strategy!r}. Give "
            "'contiguous' for equal parts."
        )
    for worker, workload in enumerate(workloads):
        if not isinstance(workload, Real):
            raise ConfigError(
                f"`strategy` must hold numbers, but workload {worker} is {workload!r}."
            )
    return [float(workload) for workload in workloads]
