"""The curve and the epochs of a training, from its events."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.callbacks.event_records import Record
from phalanx.callbacks.events import AttachedTrainer, EpochDone, FitBegun, FitEnded, StepDone
from phalanx.callbacks.figure import draw_training
from phalanx.clock import now_s
from phalanx.errors import ConfigError
from phalanx.plan import check_argument, read_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EpochMeans", "History", "Totals"]


@dataclass
class EpochMeans:
    """The means of one finished epoch; ``last_step`` counts from the beginning of the run."""

    epoch: int
    last_step: int
    train: Mapping[str, float]
    validation: Mapping[str, float] | None


@dataclass
class Totals:
    """Sums over the steps of this process, not of the earlier ones of a resumed run."""

    samples: int = 0
    step_seconds: float = 0.0
    # Steps and whatever lies between two that follow each other, such as loading; not tests.
    training_seconds: float = 0.0
    busy_s: list[float] = field(default_factory=list)
    _previous_end_s: float | None = None

    def add(self, event: StepDone, time_s: float) -> None:
        """Add one step, which ended at ``time_s``."""
        self.samples += event.samples
        self.step_seconds += event.seconds
        begun_s = self._previous_end_s
        self.training_seconds += event.seconds if begun_s is None else time_s - begun_s
        self._previous_end_s = time_s
        if len(self.busy_s) != len(event.busy_s):
            self.busy_s = [0.0] * len(event.busy_s)
        for replica, seconds in enumerate(event.busy_s):
            self.busy_s[replica] += seconds

    def interrupt(self) -> None:
        """Something else than training comes next."""
        self._previous_end_s = None

    def samples_per_s(self) -> float:
        """Return the speed of training by the clock on the wall."""
        return self.samples / self.training_seconds if self.training_seconds else 0.0

    def busy(self) -> list[float]:
        """Return for each replica the fraction of the steps' time in which it worked."""
        return [min(1.0, busy / self.step_seconds) for busy in self.busy_s if self.step_seconds]


class History:
    """A callback that keeps the curve of a training and its epochs.

    Attributes:
        losses: The loss of each step since it was first called; that of step s is at index s - 1
            where that was at the run's beginning.
        epochs: The finished epochs.
        totals: Sums over this process.

    Example:
        >>> history = History()
        >>> history.restore([{"kind": "step", "step": 1, "loss": 2.5}])
        >>> history.losses, history.epochs
        ([2.5], [])
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[EpochMeans] = []
        self.totals = Totals()
        self._trainer: AttachedTrainer | None = None
        self._writes = True  # noted in each `fit`: a plot comes when the ranks' group may be gone

    def attach(self, trainer: AttachedTrainer) -> None:
        """Start over, with the training of ``trainer``."""
        self._clear()
        self._trainer = trainer

    def _clear(self) -> None:
        self.losses.clear()
        self.epochs.clear()
        self.totals = Totals()

    def plot(self, path: str | Path | None = None, *, title: str = "Training") -> Figure:
        """Draw the losses, and the accuracy if there is one.

        Args:
            path: A PNG file to be written, by the first of the ranks.
            title: The line above all.

        Returns:
            matplotlib's figure, which a notebook shows after ``%matplotlib inline``.

        Raises:
            ConfigError: It cannot be written there.
        """
        fits = path is None or isinstance(path, (str, os.PathLike))
        check_argument(fits, "path", "be a path", path)
        place = Path(path) if path is not None and self._writes else None
        try:
            return draw_training(self, title=title, path=place)
        except OSError as error:
            raise ConfigError(
                f"`path` must be a file that can be written, but is {str(path)!r}: {error}. Name "
                "another, in a folder that exists."
            ) from error

    def state_dict(self) -> dict[str, Any]:  # Any: a tensor, or JSON
        """Return the losses and the epochs, for a checkpoint."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return {"losses": losses, "epochs": [asdict(each) for each in self.epochs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: It is nothing of the kind; nothing has changed then.
        """
        losses, epochs = state["losses"], [_checked_epoch(each) for each in state["epochs"]]
        if not isinstance(losses, Tensor) or losses.dtype != torch.float64 or losses.dim() != 1:
            raise ValueError(f"`losses` is {losses!r:.80}, no list of losses")
        self._clear()
        self.losses.extend(losses.tolist())
        self.epochs.extend(epochs)

    def restore(self, records: Iterable[Record]) -> None:
        """Hold what the records say that earlier processes of this run wrote."""
        records = list(records)
        self.losses = [_number(each["loss"]) for each in records if each["kind"] == "step"]
        self.epochs = [_epoch_of(each) for each in records if each["kind"] == "epoch"]

    def __call__(self, event: object) -> None:
        """Listen to one event; microseconds, as nothing is written here."""
        if isinstance(event, (FitBegun, FitEnded)):
            self._writes = self._trainer is None or self._trainer.is_first_rank
        elif isinstance(event, StepDone):
            self.losses.append(event.loss)
            self.totals.add(event, now_s())
        elif isinstance(event, EpochDone):
            self.totals.interrupt()
            self.epochs.append(
                EpochMeans(event.epoch, event.steps, dict(event.train), _copied(event.validation))
            )


def _epoch_of(record: Record) -> EpochMeans:
    """Read a record; null stands for a number that JSON has no word for."""
    train, validation = record["train"], record["validation"]
    return EpochMeans(
        epoch=record["epoch"],
        last_step=record["last_step"],
        train={name: _number(value) for name, value in train.items()},
        validation=None
        if validation is None
        else {name: _number(value) for name, value in validation.items()},
    )


def _checked_epoch(state: Mapping[str, Any]) -> EpochMeans:
    """Read an epoch of a checkpoint."""
    for name in ("epoch", "last_step"):
        if read_whole(name, state[name]) < 0:
            raise ValueError(f"`{name}` is {state[name]!r}, below 0")
    validation = {} if state["validation"] is None else state["validation"]
    for name, mean in [*state["train"].items(), *validation.items()]:
        if not isinstance(name, str) or not isinstance(mean, float):
            raise ValueError(
                f"an epoch's mean is {name!r:.40}: {mean!r:.40}, no name with a number"
            )
    return EpochMeans(**state)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _copied(means: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if means is None else dict(means)
