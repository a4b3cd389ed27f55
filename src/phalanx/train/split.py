"""One batch for several workers: which of them gets which samples.

Shape legend: B samples; k workers; * whatever else a sample has.

    round_robin   worker 0: 0 3 6    worker 1: 1 4    worker 2: 2 5
    contiguous    worker 0: 0 1 2    worker 1: 3 4    worker 2: 5 6
    [2, 1, 0]     worker 0: 0 1 2 3 4    worker 1: 5 6    worker 2: –
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import (
    check_workloads,
    equal_sizes,
    fixed_workloads,
    flatten,
    leaf_paths,
    read_count,
    unflatten,
    workload_sizes,
)

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
            is cut along dim 0. Or a sequence of samples, whatever these are: what has a length and
            can be indexed.
        n_workers: k, at least 1.
        strategy: ``"round_robin"``: sample i goes to worker i mod k. ``"contiguous"``: neighbours
            stay together, and the first workers get one more where k does not divide B. Or one
            workload per worker: contiguous too, in these proportions (largest remainder).
        by: ``"rows"``: ``samples`` is a batch. ``"items"``: it is a sequence of samples. By
            default, sequences whose first item is no tensor and no array are samples, and
            everything else is a batch.

    Shapes:
        tensors and arrays [B, *] of any dtype -> k parts [b, *]; the sizes b are B together and
        differ by at most one, or from the workloads' exact shares by less than one.

    Returns:
        For each worker a batch like ``samples``, or some samples: a list, tuple or range if
        ``samples`` is one, else a list.

    Raises:
        ConfigError: ``n_workers`` is less than 1; a strategy is unknown, or workloads are not one
            finite number ≥ 0 per worker with one above 0; leaves of a batch differ in B or are no
            tensors.

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
    workers = read_count("n_workers", n_workers, 1)
    if by not in (None, "rows", "items"):
        raise ConfigError(f"`by` must be 'rows', 'items' or None, but is {by!r}.")
    if by == "rows" or (by is None and _is_batch(samples)):
        leaves, spec = flatten(samples)
        picks = _picks(_num_rows(samples, leaves), workers, strategy)
        return [unflatten([leaf[pick] for leaf in leaves], spec) for pick in picks]
    picks = _picks(len(samples), workers, strategy)
    if isinstance(samples, (list, tuple, range)):
        return [samples[pick] for pick in picks]
    return [[samples[index] for index in range(len(samples))[pick]] for pick in picks]


def _picks(total: int, workers: int, strategy: str | Sequence[float]) -> list[slice]:
    """Return which of ``total`` samples each worker gets."""
    if not isinstance(strategy, str):
        workloads = fixed_workloads(strategy) or []
        check_workloads(workloads, workers)
        sizes = workload_sizes(total, workloads)
    elif strategy == "round_robin":
        return [slice(worker, total, workers) for worker in range(workers)]
    elif strategy == "contiguous":
        sizes = equal_sizes(total, workers)
    else:
        raise ConfigError(
            "`strategy` must be 'round_robin', 'contiguous' or one workload per worker, but is "
            f"{strategy!r}."
        )
    stops = list(accumulate(sizes))
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _is_batch(samples: Any) -> bool:
    if isinstance(samples, (list, tuple)):
        return bool(samples) and _is_array(samples[0])
    is_record = dataclasses.is_dataclass(samples)
    return _is_array(samples) or isinstance(samples, Mapping) or is_record


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _num_rows(samples: Any, leaves: Sequence[Any]) -> int:
    """Return B, the same for all leaves."""
    sizes = [len(leaf) if _is_array(leaf) and leaf.ndim else None for leaf in leaves]
    for place, size in enumerate(sizes):
        if size is None or size != sizes[0]:
            told = f"has {size}" if size is not None else f"is {type(leaves[place]).__name__!r}"
            raise ConfigError(
                f"Leaf `{leaf_paths(samples)[place]}` of `samples` must be a tensor or array of "
                f"{'some' if sizes[0] is None else sizes[0]} rows along dim 0, but {told}. Give "
                "values that are not per sample to workers by themselves, or by='items' if "
                "`samples` is a sequence of samples."
            )
    if not sizes:
        raise ConfigError(f"`samples` must hold a tensor to be cut, but is {samples!r:.80}.")
    return sizes[0] or 0
