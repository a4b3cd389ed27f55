"""oxirs-embed's ``distributed_training``: samples split over workers, and their updates merged.

    trainer = DataParallelTrainer()
    updates = [work(bucket) for bucket in trainer.split_batch(samples, 4)]  # -> WorkerUpdate
    step = trainer.merge_worker_updates(updates)                            # -> ModelUpdate

docs/migrating_oxirs.md has the names, and what is different.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import read_count

__all__ = [
    "DataParallelTrainer",
    "DistributedTrainingSample",
    "ModelUpdate",
    "WorkerUpdate",
]


@dataclass
class DistributedTrainingSample:
    """One sample.

    Args:
        features: Numbers, or whatever else the model takes.
        label: What the model should say.
        weight: How much the sample counts; 1.0 if None.
    """

    features: Any  # a list of floats in Rust
    label: float
    weight: float | None = None


@dataclass
class WorkerUpdate:
    """The gradients and the loss of one worker's samples.

    Args:
        worker_id: Updates are summed in the order of these.
        gradients: Of the worker's mean loss; the weighted mean where its samples have weights. A
            list of numbers or of floating-point tensors.
        loss: That mean loss.
        samples_processed: How many samples there were, ≥ 0.
        weight: The sum of their weights; ``samples_processed`` if None. Rust had no such field.
    """

    worker_id: int
    gradients: Sequence[float] | Sequence[Tensor]
    loss: float
    samples_processed: int
    weight: float | None = None


@dataclass
class ModelUpdate:
    """The gradients of one step.

    Args:
        averaged_gradients: Like a worker's; an empty list if no worker had samples.
        mean_loss: Over all samples.
        total_samples: How many these were.
    """

    averaged_gradients: list[Any]  # Any: numbers or tensors
    mean_loss: float
    total_samples: int


@dataclass(frozen=True)
class DataParallelTrainer:
    """Split batches over workers, and merge what they found.

    Example:
        >>> trainer = DataParallelTrainer()
        >>> data = [DistributedTrainingSample([float(i)], 0.0) for i in range(10)]
        >>> [len(bucket) for bucket in trainer.split_batch(data, 3)]
        [4, 3, 3]
        >>> trainer.merge_worker_updates(
        ...     [WorkerUpdate(0, [4.0], 2.0, 1), WorkerUpdate(1, [0.0], 0.0, 3)]
        ... )
        ModelUpdate(averaged_gradients=[1.0], mean_loss=0.5, total_samples=4)

    Source: oxirs-embed 0.2.2, ``distributed_training::DataParallelTrainer``.
    """

    # Any: a list, tuple, array or tensor of samples.
    def split_batch(self, data: Any, n_workers: int) -> list[Any]:
        """Deal samples out in turn: sample i goes to worker i mod ``n_workers``.

        Args:
            data: Samples that can be sliced: a list, or a tensor, whose parts are views.
            n_workers: How many buckets there are; 0 makes none.

        Returns:
            A bucket for each worker, empty where there are more workers than samples. In Rust, no
            samples made no buckets.

        Raises:
            ConfigError: ``n_workers`` is negative.
        """
        workers = read_count("n_workers", n_workers, 0)
        return [data[worker::workers] for worker in range(workers)]

    def merge_worker_updates(self, updates: Sequence[WorkerUpdate]) -> ModelUpdate:
        """Average gradients and losses, weighted by samples or by their weights.

        If no worker has processed a sample, gradients are an empty list and the loss is 0, as in
        Rust. An update of weight 0 is not looked at.

        Raises:
            ConfigError: Gradients differ in length or shape, a loss or a weight is not finite, or
                all weights are 0, though there are samples.

        Determinism: computed in float64 in the order of ``worker_id``.
        """
        in_order = sorted(updates, key=lambda each: each.worker_id)
        samples = sum(read_count("samples_processed", x.samples_processed, 0) for x in in_order)
        if not samples:
            return ModelUpdate([], 0.0, 0)
        counted = [each for each in in_order if _weight_of(each)]
        weights = [_weight_of(each) for each in counted]
        if not counted or not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(
                f"`weight` must be finite, at least 0 and not 0 for all updates, but is {weights}."
            )
        for each in counted:
            _check_alike(each, counted[0])
        columns = zip(*(each.gradients for each in counted), strict=True)
        loss = _mean([float(each.loss) for each in counted], weights)
        return ModelUpdate([_mean(column, weights) for column in columns], loss, samples)


def _weight_of(update: WorkerUpdate) -> float:
    """Return the weight of an update's mean; 0 where it has no samples."""
    given = update.samples_processed if update.weight is None else update.weight
    return float(given) if update.samples_processed else 0.0


def _check_alike(update: WorkerUpdate, first: WorkerUpdate) -> None:
    """Refuse gradients that are not like the first worker's, and a loss that is no number."""
    if not math.isfinite(update.loss):
        raise ConfigError(
            f"`loss` of update {update.worker_id} must be a finite number, but is {update.loss!r}."
        )
    shapes, wanted = (
        [tuple(x.shape) if isinstance(x, Tensor) else () for x in each.gradients]
        for each in (update, first)
    )
    if shapes != wanted:
        raise ConfigError(
            f"`gradients` of update {update.worker_id} must have the shapes of update "
            f"{first.worker_id}, {wanted!s:.120}, but have {shapes!s:.120}."
        )


# Any: numbers or tensors.
def _mean(column: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of one gradient, computed in float64."""
    total = math.fsum(weights)
    if not isinstance(column[0], Tensor):
        terms = [float(each) * weight for each, weight in zip(column, weights, strict=True)]
        return math.fsum(terms) / total
    wide = [each.detach().double() * weight for each, weight in zip(column, weights, strict=True)]
    return (sum(wide[1:], wide[0]) / total).to(column[0].dtype)
