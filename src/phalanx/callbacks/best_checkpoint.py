"""Keep the checkpoints of the best epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.callbacks.events import AttachedTrainer, EpochDone, FitBegun
from phalanx.callbacks.monitored_mean import MonitoredMean
from phalanx.callbacks.saved_folders import (
    check_saved_name,
    name_of_step,
    read_saved_folder,
    remove_checkpoint,
)
from phalanx.plan import read_count

__all__ = ["BestCheckpoint"]


class BestCheckpoint:
    """A callback that saves after each epoch that is among the best, in a folder of its own.

    Below ``folder`` there are folders such as ``step-00001200``, each for `Trainer.resume`. One
    that is among the best no more is removed, unless it holds something that `Trainer.save` does
    not write. It is called after the other callbacks, and so saves what they have counted.

    Args:
        folder: Made when it is needed.
        monitor: "train.<metric>" or "validation.<metric>".
        mode: "min" if less is better, or "max".
        keep: How many.

    Raises:
        ConfigError: An argument cannot work; at the beginning of `fit`: its epochs will have no
            such metric.

    Collective: On ranks each saves, as `Trainer.save` wants; the first one removes.
    """

    saves = True  # see `Callback`

    def __init__(
        self,
        folder: str | Path,
        monitor: str = "validation.loss",
        mode: str = "min",
        keep: int = 1,
    ) -> None:
        self.folder = read_saved_folder("folder", folder)
        self._monitor = MonitoredMean(monitor, mode)
        self._keep = read_count("keep", keep, 1)
        self._kept: list[tuple[float, str]] = []  # the best first
        self._trainer: AttachedTrainer | None = None

    @property
    def best(self) -> Path | None:
        """The folder of the best epoch whose checkpoint is there; None for none.

        After a resume these are the folders that were kept at that time; some may have been removed
        since.
        """
        return next((folder for folder in self.kept if folder.is_dir()), None)

    @property
    def kept(self) -> dict[Path, float]:
        """The folders that are kept, each with its value, the best first."""
        return {self.folder / name: value for value, name in self._kept}

    def attach(self, trainer: AttachedTrainer) -> None:
        """Start over, with the training of ``trainer``."""
        self._trainer = trainer
        self._kept = []

    def __call__(self, event: object) -> None:
        """Look at an epoch."""
        if isinstance(event, FitBegun):
            self._monitor.check(event)
        elif isinstance(event, EpochDone) and self._trainer is not None:
            value = self._monitor.read(event)
            if math.isfinite(value):
                self._take(value, name_of_step(event.steps), self._trainer)

    def _take(self, value: float, name: str, trainer: AttachedTrainer) -> None:
        before = self._kept
        others = [each for each in before if each[1] != name]
        place = sum(not self._monitor.is_better(value, other) for other, _ in others)
        ranked = [*others[:place], (value, name), *others[place:]]
        if place >= self._keep:
            return
        self._kept = ranked[: self._keep]  # the checkpoint is to know of itself
        try:
            trainer.save(self.folder / name)
        except BaseException:
            self._kept = before
            raise
        if trainer.is_first_rank:
            for _, dropped in ranked[self._keep :]:
                remove_checkpoint(self.folder / dropped)

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return which folders are kept, and their values."""
        return {"kept": [[value, name] for value, name in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: It is nothing of the kind; nothing has changed then.
        """
        kept = [(value, name) for value, name in state["kept"]]
        for value, name in kept:
            if not isinstance(value, float) or not math.isfinite(value):
                raise ValueError(f"`kept` holds the value {value!r:.80}")
            check_saved_name(name)
        self._kept = kept

    def __repr__(self) -> str:
        return f"BestCheckpoint({str(self.folder)!r}, {self._monitor.name!r}, keep={self._keep})"
