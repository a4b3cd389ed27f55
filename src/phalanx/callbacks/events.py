"""The events of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.execution import Span, WorkerLost


@dataclass(frozen=True, kw_only=True)
class FitBegun:
    """A call of `fit` begins: its first event.

    Attributes:
        epochs: Epochs finished since the beginning.
        steps: Steps done since the beginning.
        last_epoch: Number of the last epoch of this call; None where steps decide.
        last_step: Number of the last possible step; None where epochs decide.
        steps_per_epoch: Length of the loader; None where it has none.
        means: Names of the means of each `EpochDone`, such as "train.loss", "validation.loss".
    """

    epochs: int
    steps: int
    last_epoch: int | None
    last_step: int | None
    steps_per_epoch: int | None
    means: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FitEnded:
    """A call of `fit` is over, because it is done, stopped or failed: its last event.

    Attributes:
        epochs: Epochs finished since the beginning.
        steps: Steps done since the beginning.
        stopped: True if `Trainer.stop` ended it, or Ctrl-C, which counts only without ranks.
    """

    epochs: int
    steps: int
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One optimizer update is done.

    Attributes:
        step: Its number since the beginning, from 1.
        epoch: Number of the running epoch, from 1; `Trainer.step` moves neither it nor `batch`.
        batch: Number of the batch within the epoch, from 1.
        loss: Loss of the whole batch.
        samples: Rows of the batch.
        seconds: Time from the batch to the updated weights.
        shares: Rows that each replica computed; with executor="ranks", here and below, this rank's.
        spans: Times of each replica's work, by the monotonic clock.
        grad_norm: The 2-norm of all gradients before they were clipped; None without `clip_norm`.
        learning_rates: The learning rate of each parameter group in this step; nan where the group
            has no number.
    """

    step: int
    epoch: int
    batch: int
    loss: float
    samples: int
    seconds: float
    shares: tuple[int, ...]
    spans: tuple[Span, ...]
    grad_norm: float | None = None
    learning_rates: tuple[float, ...] = ()

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of each replica's spans: its microbatches, and its part of sum and step."""
        busy_s = [0.0] * len(self.shares)
        for span in self.spans:
            busy_s[span.replica] += span.stop_s - span.start_s
        return tuple(busy_s)


@dataclass(frozen=True, kw_only=True)
class EpochDone:
    """One pass over the loader is done.

    Attributes:
        epoch: Its number, from 1.
        steps: Steps done since the beginning.
        samples: Rows of this epoch.
        seconds: Time of this epoch without validation.
        train: "loss" (weighted mean over the epoch's steps) and the metrics of the training.
        validation: The same of the validation loader after the epoch; None without validation.
    """

    epoch: int
    steps: int
    samples: int
    seconds: float
    train: Mapping[str, float]
    validation: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class RanksChanged:
    """Ranks of ``executor=Ranks()`` were lost or have joined; sent before the step's `StepDone`.

    Attributes:
        step: Number of the update in which it was noticed.
        rank: This process's place among the ranks that train now.
        ranks: The ``RANK`` of each of them, as its launcher set it.
        pids: Their process numbers.
        lost: The ``RANK`` of each lost rank.
        came: The ``RANK`` of each new rank.
    """

    step: int
    rank: int
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    lost: tuple[int, ...]
    came: tuple[int, ...]


Event = FitBegun | StepDone | EpochDone | WorkerLost | RanksChanged | FitEnded
