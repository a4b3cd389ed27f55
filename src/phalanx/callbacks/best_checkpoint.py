"""Keep the checkpoints of the best epochs."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.callbacks.events import AttachedTrainer, EpochDone, FitBegun
from phalanx.callbacks.monitored_mean import MonitoredMean
from phalanx.errors import ConfigError
from phalanx.plan import check_argument, read_count

__all__ = ["BestCheckpoint"]

_NAME = re.compile(r"step-\d{8,18}")
_FILE = re.compile(r"checkpoint\.json|model\.safetensors|state\.pt")


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
        check_argument(isinstance(folder, (str, os.PathLike)), "folder", "be a path", folder)
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(
                f"`folder` must be a folder, but {str(folder)!r} is a file. Name another."
            )
        self._monitor = MonitoredMean(monitor, mode)
        self._keep = read_count("keep", keep, 1)
        self._kept: list[tuple[float, str]] = []  # the best first
        self._trainer: AttachedTrainer | None = None

    @property
    def best(self) -> Path | None:
        """The folder of the best epoch whose checkpoint is there; None for none.

        Training that goes on from a checkpoint knows of the folders that were kept then, of which
        some may have been removed since.
        """
        return next((folder for folder in self.kept if folder.is_dir()), None)

    @property
    def kept(self) -> dict[Path, float]:
        """The folders that are kept, each with its value, the best first."""
        return {self.folder / name: value for value, name in self._kept}

    def attach(self, trainer: AttachedTrainer) -> None:
        """Begin anew, with the training of ``trainer``."""
        self._trainer = trainer
        self._kept = []

    def __call__(self, event: object) -> None:
        """Look at an epoch."""
        if isinstance(event, FitBegun):
            self._monitor.check(event)
        elif isinstance(event, EpochDone) and self._trainer is not None:
            value = self._monitor.read(event)
            if math.isfinite(value):
                self._take(value, f"step-{event.steps:08d}", self._trainer)

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
                _remove_checkpoint(self.folder / dropped)

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
            if not isinstance(name, str) or not _NAME.fullmatch(name):  # it may be removed later
                raise ValueError(f"`kept` holds {name!r:.80}, no folder of ours")
        self._kept = kept

    def __repr__(self) -> str:
        return f"BestCheckpoint({str(self.folder)!r}, {self._monitor.name!r}, keep={self._keep})"


def _remove_checkpoint(folder: Path) -> None:
    """Remove a folder that holds what `Trainer.save` writes, and nothing else."""
    if not folder.is_dir():
        return
    found = list(folder.iterdir())
    if folder.is_symlink() or not all(
        _FILE.fullmatch(each.name) and _is_file(each) for each in found
    ):
        warnings.warn(
            f"{folder} is among the best no more, but stays: it is a link, or holds more than a "
            "checkpoint.",
            stacklevel=2,
        )
        return
    for path in found:
        path.unlink()
    folder.rmdir()


def _is_file(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()
