"""The losses and the epochs of a training, from its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import EpochDone, StepDone


class History(Callback):
    """A callback that keeps the loss of each step and the means of each epoch.

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
        self.epochs: list[EpochDone] = []

    def attach(self, trainer: Any) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self.losses.clear()
        self.epochs.clear()

    def state_dict(self) -> dict[str, Any]:  # Any: a tensor, or JSON
        """Return the losses and the epochs, for a checkpoint."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return {"losses": losses, "epochs": [asdict(each) for each in self.epochs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        epochs = [EpochDone(**each) for each in state["epochs"]]
        self.losses[:], self.epochs[:] = state["losses"].tolist(), epochs

    def on_step_end(self, event: StepDone) -> None:
        """Keep the loss; microseconds, as nothing is written here."""
        self.losses.append(event.loss)

    def on_epoch_end(self, event: EpochDone) -> None:
        """Keep the means."""
        self.epochs.append(event)
