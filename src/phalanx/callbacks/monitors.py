"""The mean of an epoch that tells which of two is better, and a stop where none gets better."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import EpochDone, FitBegun
from phalanx.callbacks.log_files import means_of
from phalanx.errors import ConfigError
from phalanx.plan import check_argument, read_count, read_number


class MonitoredMean:
    """A mean that is read after each epoch and compared with an earlier one.

    Args:
        name: "train.<metric>" or "validation.<metric>".
        mode: "min" if less is better, or "max".

    Raises:
        ConfigError: The name is of no such form, or the mode is another.
    """

    def __init__(self, name: str, mode: str) -> None:
        fits = re.match(r"(train|validation)\..", str(name)) is not None
        wanted = "be 'train.' or 'validation.' and the name of a metric"
        check_argument(fits, "monitor", wanted, name, "Give 'validation.loss', say.")
        check_argument(mode in ("min", "max"), "mode", "be 'min' or 'max'", mode)
        self.name, self.mode = name, mode

    def check(self, begun: FitBegun) -> None:
        """Refuse a `fit` whose epochs will have no such mean.

        Which of a metric's several numbers there will be is known at the end of the epoch.
        """
        if not any(self.name.startswith(f"{name}.") for name in begun.means):
            self._check_among(begun.means)

    def read(self, epoch: EpochDone) -> float:
        """Return the epoch's value."""
        means = means_of(epoch, ".")
        self._check_among(tuple(means))
        return float(means[self.name])

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Tell whether ``value`` is better by more than ``by``; NaN never is.

        Example:
            >>> MonitoredMean("train.loss", "min").is_better(1.0, 2.0, by=0.5)
            True
        """
        if than is None:
            return not math.isnan(value)
        return value < than - by if self.mode == "min" else value > than + by

    def _check_among(self, names: tuple[str, ...]) -> None:
        if self.name in names:
            return
        way_out = ""
        if self.name.startswith("validation.") and "validation.loss" not in names:
            way_out = " Give `fit()` a loader to validate on: validate=…"
        raise ConfigError(
            f"`monitor` must be one of {', '.join(map(repr, names))}, but is {self.name!r}."
            f"{way_out}"
        )


class EarlyStopping(Callback):
    """A callback that stops `fit` after some epochs that were no better than the best.

    The weights stay those of the last epoch; a `Checkpoint` with the same ``monitor`` has the best.
    It also ends a later `fit` of the same run, after a resume say, before its first step.

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
        check_argument(self.min_delta >= 0, "min_delta", "be at least 0", min_delta)
        self.best: float | None = None
        self.waited = 0

    def attach(self, trainer: Any) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self.best, self.waited = None, 0

    def on_fit_begin(self, event: FitBegun) -> None:
        """Refuse a `fit` whose epochs will have no such metric; end one of a run that is over."""
        self._monitor.check(event)
        self._stop_if_over()

    def on_epoch_end(self, event: EpochDone) -> None:
        """Compare an epoch with the best one."""
        value = self._monitor.read(event)
        if self._monitor.is_better(value, self.best, self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        if self.waited >= self.patience and self.trainer is not None:
            self.trainer.stop()

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return the best value, and how long ago it was."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.best, self.waited = state["best"], state["waited"]
