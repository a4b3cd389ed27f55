"""The curve and the epochs of a training, from its events."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import AttachedTrainer, EpochDone, FitBegun, FitEnded, StepDone
from phalanx.callbacks.figure import draw_training
from phalanx.errors import ConfigError
from phalanx.plan import check_argument, read_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EpochMeans", "History"]


@dataclass
class EpochMeans:
    """The means of one finished epoch; ``last_step`` counts from the beginning of the run."""

    epoch: int
    last_step: int
    train: Mapping[str, float]
    validation: Mapping[str, float] | None


class History(Callback):
    """A callback that keeps the curve of a training and its epochs.

    Attributes:
        losses: The loss of each step since it was first called; that of step s is at index s - 1
            where that was at the run's beginning.
        epochs: The finished epochs.

    Example:
        >>> history = History()
        >>> history.losses, history.epochs
        ([], [])
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[EpochMeans] = []
        self._writes = True  # noted in each `fit`: a plot comes when the ranks' group may be gone

    def attach(self, trainer: AttachedTrainer) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self._clear()

    def _clear(self) -> None:
        self.losses.clear()
        self.epochs.clear()

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

    def on_fit_begin(self, event: FitBegun) -> None:  # noqa: ARG002
        """Note whether this rank writes."""
        self._writes = self.is_writer

    def on_step_end(self, event: StepDone) -> None:
        """Keep the loss; microseconds, as nothing is written here."""
        self.losses.append(event.loss)

    def on_epoch_end(self, event: EpochDone) -> None:
        """Keep the means."""
        validation = None if event.validation is None else dict(event.validation)
        self.epochs.append(EpochMeans(event.epoch, event.steps, dict(event.train), validation))

    def on_fit_end(self, event: FitEnded) -> None:  # noqa: ARG002
        """Note whether this rank writes."""
        self._writes = self.is_writer


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
