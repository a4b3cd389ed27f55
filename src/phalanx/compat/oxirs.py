"""The names of oxirs-embed's ``distributed_training``, over ``split_batch`` and ``merge_updates``.

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

from phalanx import train
from phalanx.errors import ConfigError
from phalanx.train import Update, merge_updates

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
    """What one worker found; see :class:`phalanx.Update`, whose ``rank`` is the ``worker_id``.

    Args:
        worker_id: Updates are summed in the order of these.
        gradients: Of the worker's mean loss; the weighted mean where its samples have weights.
        loss: That mean loss.
        samples_processed: How many samples there were, ≥ 0.
        weight: The sum of their weights; ``samples_processed`` if None. Rust had no such field.
    """

    worker_id: int
    gradients: Any  # a list of floats in Rust; anything that `merge_updates` takes here
    loss: float
    samples_processed: int
    weight: float | None = None

    @classmethod
    def of(
        cls,
        worker_id: int,
        gradients: Any,
        loss: float,
        samples: Sequence[DistributedTrainingSample],
    ) -> WorkerUpdate:
        """Make the update of these samples: their number and the sum of their weights.

        Raises:
            ConfigError: A weight is negative.

        Example:
            >>> samples = [DistributedTrainingSample([0.5], 1.0, weight) for weight in (None, 2.0)]
            >>> WorkerUpdate.of(0, [0.25], 0.1, samples).weight
            3.0
        """
        weights = [1.0 if sample.weight is None else sample.weight for sample in samples]
        for index, weight in enumerate(weights):
            if weight < 0:
                raise ConfigError(
                    f"`weight` of sample {index} must be at least 0, but is {weight!r}."
                )
        return cls(worker_id, gradients, loss, len(samples), math.fsum(weights))


@dataclass
class ModelUpdate:
    """The gradients of one step.

    Args:
        averaged_gradients: Like a worker's; an empty list if no worker had samples.
        mean_loss: Over all samples.
        total_samples: How many these were.
    """

    averaged_gradients: Any
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

    def split_batch(self, data: Any, n_workers: int) -> list[Any]:
        """Deal samples out in turn, a bucket for each worker; see :func:`phalanx.split_batch`.

        No samples make empty buckets, not none as in Rust. No workers have no buckets.

        Raises:
            ConfigError: ``n_workers`` is negative, or as :func:`phalanx.split_batch` has it.
        """
        return train.split_batch(data, n_workers) if n_workers != 0 else []

    def merge_worker_updates(self, updates: Sequence[WorkerUpdate]) -> ModelUpdate:
        """Average gradients and losses weighted by samples; see :func:`phalanx.merge_updates`.

        If nobody has processed a sample, gradients are an empty list and the loss is 0, as in Rust.

        Raises:
            ConfigError: Gradients differ in length or kind, a loss or weight is not finite, or what
                else :func:`phalanx.merge_updates` refuses; all weights are 0, though there are
                samples.
        """
        merged = [_update(each) for each in updates]
        if not any(each.samples for each in merged):
            return ModelUpdate([], 0.0, 0)
        mean = merge_updates(merged)
        return ModelUpdate(mean.gradients, float(mean.loss), mean.samples)


def _update(each: WorkerUpdate) -> Update:
    try:
        return Update(
            each.gradients, each.loss, each.samples_processed, each.weight, each.worker_id
        )
    except ConfigError as refusal:
        refusal.add_note(f"in the update of worker {each.worker_id!r}")
        raise
