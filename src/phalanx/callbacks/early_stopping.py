"""Stop a training that gets no better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import AttachedTrainer, EpochDone, FitBegun
from phalanx.callbacks.monitored_mean import MonitoredMean, check_best
from phalanx.errors import ConfigError
from phalanx.plan import read_count, read_number

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """A callback that stops `fit` after some epochs that were no better than the best.

    Args:
        monitor: "train.<metric>" or "validation.<metric>".
        patience: After how many such epochs in a row.
        min_delta: By how much an epoch must be better to count.
        mode: "min" if less is better, or "max".

    Attributes:
        best: The best value so far; None before the first epoch.
        waited: How many epochs have passed since.

    Raises:
        ConfigError: An argument cannot work; at the beginning of `fit`: its epochs will have no
            such metric.

    Example:
        >>> stopping = EarlyStopping("validation.accuracy", patience=5, mode="max")
        >>> stopping.best, stopping.waited
        (None, 0)
    """

    def __init__(
        self,
        monitor: str = "validation.loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "min",
    ) -> None:
        self._monitor = MonitoredMean(monitor, mode)
        self.patience = read_count("patience", patience, 1, "epoch")
        self.min_delta = read_number("min_delta", min_delta)
        if not self.min_delta >= 0:
            raise ConfigError(f"`min_delta` must be at least 0, but is {min_delta!r}.")
        self.best: float | None = None
        self.waited = 0

    def attach(self, trainer: AttachedTrainer) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self.best, self.waited = None, 0

    def on_fit_begin(self, event: FitBegun) -> None:
        """Refuse a `fit` whose epochs will have no such metric."""
        self._monitor.check(event)

    def on_epoch_end(self, event: EpochDone) -> None:
        """Compare an epoch with the best one."""
        value = self._monitor.read(event)
        if self._monitor.is_better(value, self.best, self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.waited >= self.patience and self.trainer is not None:
            self.trainer.stop()

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return the best value, and how long ago it was."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            KeyError, ValueError: It is nothing of the kind; nothing has changed then.
        """
        best, waited = state["best"], read_count("waited", state["waited"], 0)
        check_best(best)
        self.best, self.waited = best, waited

    def __repr__(self) -> str:
        return f"EarlyStopping({self._monitor.name!r}, patience={self.patience})"
