"""The mean by which `EarlyStopping` and `Checkpoint` tell which of two epochs is better."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from phalanx.callbacks.events import EpochDone, FitBegun
from phalanx.errors import ConfigError
from phalanx.plan import check_argument

__all__ = ["MonitoredMean", "check_best"]

_NAME = re.compile(r"(train|validation)\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class MonitoredMean:
    """A mean that is read after each epoch and compared with an earlier one.

    Args:
        name: "train.<metric>" or "validation.<metric>".
        mode: "min" if less is better, or "max".

    Raises:
        ConfigError: The name is of no such form, or the mode is another.
    """

    name: str
    mode: str

    def __post_init__(self) -> None:
        name: Any = self.name  # Any: whatever the user wrote
        fits = isinstance(name, str) and _NAME.fullmatch(name) is not None
        wanted = "be 'train.' or 'validation.' and the name of a metric"
        check_argument(fits, "monitor", wanted, self.name, "Give 'validation.loss', say.")
        check_argument(self.mode in ("min", "max"), "mode", "be 'min' or 'max'", self.mode)

    def check(self, begun: FitBegun) -> None:
        """Refuse a `fit` whose epochs will have no such mean.

        Which of a metric's several numbers there will be is known at the end of the epoch.
        """
        if not any(self.name.startswith(f"{name}.") for name in begun.means):
            self._check_among(begun.means)

    def read(self, epoch: EpochDone) -> float:
        """Return the epoch's value."""
        means = {f"train.{name}": value for name, value in epoch.train.items()}
        means |= {f"validation.{name}": value for name, value in (epoch.validation or {}).items()}
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


def check_best(value: Any) -> None:  # Any: what a checkpoint holds
    """Refuse what is neither None nor a value that can be the best.

    Raises:
        ValueError: It is not.
    """
    if value is not None and (not isinstance(value, float) or math.isnan(value)):
        raise ValueError(f"`best` is {value!r:.80}, no number")
