"""Save checkpoints every so many epochs or steps, and keep the last or the best."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import EpochDone, FitBegun, FitEnded, StepDone
from phalanx.callbacks.monitors import MonitoredMean
from phalanx.errors import ConfigError
from phalanx.plan import check_argument, read_count
from phalanx.warning import warn_user

_NAME = re.compile(r"step-\d{8,18}")
# What `Trainer.save` writes; the last is a draft by safetensors.
_FILE = re.compile(r"checkpoint\.json|model\.safetensors|state\.pt|\.tmp[A-Za-z0-9]{6}")


class Checkpoint(Callback):
    """A callback that saves every so many epochs or steps, and keeps the last or the best.

    Below ``path`` there are folders such as ``step-00001200``, each for `Trainer.resume`, and each
    whole: a crash while one is written leaves the others, and the next save removes what the crash
    left. Without ``monitor``, a `fit` that ends by
    `Trainer.stop` or Ctrl-C is saved where it ends. A folder that is kept no more is removed after
    another was saved, unless it holds something that `Trainer.save` does not write.

    Args:
        path: A folder, made when it is needed.
        every_epochs: Save after each epoch whose number this divides; default: 1 without
            ``every_steps``.
        every_steps: Save after each step whose number this divides; not with ``monitor``. The last
            step of an epoch is saved before its validation, and the epoch again after it.
        keep: How many checkpoints stay: the last ones, or with ``monitor`` the best ones.
        monitor: "train.<metric>" or "validation.<metric>": keep the epochs that are the best by it.
        mode: "min" if less of ``monitor`` is better, or "max".

    Raises:
        ConfigError: An argument cannot work; at the beginning of `fit`: nothing can be written to
            ``path``, or its epochs will have no such metric.

    Collective: On ranks each saves, as `Trainer.save` wants; the first one removes.

    Example:
        >>> import tempfile, torch, phalanx
        >>> checkpoint = Checkpoint(tempfile.mkdtemp(), every_steps=2)
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 1))] * 3
        >>> sgd = lambda params: torch.optim.SGD(params, lr=0.1)
        >>> with phalanx.Trainer(
        ...     torch.nn.Linear(3, 1), torch.nn.MSELoss(), sgd, replicas=1, callbacks=[checkpoint]
        ... ) as trainer:
        ...     if checkpoint.last:  # of a run that was stopped
        ...         trainer.resume(checkpoint.last)
        ...     epochs = trainer.fit(data, epochs=3)
        >>> checkpoint.last.name
        'step-00000008'
    """

    saves = True

    def __init__(
        self,
        path: str | Path,
        every_epochs: int | None = None,
        every_steps: int | None = None,
        keep: int = 1,
        monitor: str | None = None,
        mode: str = "min",
    ) -> None:
        check_argument(isinstance(path, (str, os.PathLike)), "path", "be a path", path)
        self.path = Path(path)
        if every_epochs is None and every_steps is None:
            every_epochs = 1
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None:
                read_count(name, value, 1)
        if monitor is not None and every_steps is not None:
            raise ConfigError(
                f"`every_steps` must be left out with `monitor`, which epochs have, but is "
                f"{every_steps}."
            )
        self._every_epochs, self._every_steps = every_epochs, every_steps
        self._keep = read_count("keep", keep, 1)
        self._monitor = None if monitor is None else MonitoredMean(monitor, mode)
        # The best first; the last is the next to be removed. The value is a step without `monitor`.
        self._ranked: list[tuple[float, str]] = []
        self._dropped: list[str] = []  # and perhaps not removed yet

    @property
    def kept(self) -> dict[Path, float]:
        """The folders that are kept and their values of ``monitor`` (else steps), best first."""
        return {self.path / name: value for value, name in self._ranked}

    @property
    def best(self) -> Path | None:
        """The best checkpoint that is there; without ``monitor`` the newest; None for none."""
        return next((folder for folder in self.kept if folder.is_dir()), None)

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that is there: of this run, else of one before; None for none."""
        ours = [folder for folder in self.kept if folder.is_dir()]
        # A process that was killed between two renames has left `step-N.previous` alone.
        documents = self.path.glob("step-*/checkpoint.json")
        names = {each.parent.name.removesuffix(".previous") for each in documents}
        others = [self.path / name for name in names if _NAME.fullmatch(name)]
        return max(ours or others, key=lambda each: int(each.name[5:]), default=None)

    def attach(self, trainer: Any) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self._ranked, self._dropped = [], []

    def on_fit_begin(self, event: FitBegun) -> None:
        """Refuse a `fit` that could save nothing, or whose epochs will have no such metric."""
        places = [self.path, *self.path.absolute().parents]
        place = next(filter(os.path.exists, places))
        if self.is_writer and not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"`path` must be a folder that can be written, but is {str(self.path)!r}, and "
                f"{str(place)!r} is none. See to its permissions, or name another."
            )
        if self._monitor is not None:
            self._monitor.check(event)

    def on_step_end(self, event: StepDone) -> None:
        """Save, if it is time."""
        if _is_due(event.step, self._every_steps):
            self._save(event.step, event.step)

    def on_epoch_end(self, event: EpochDone) -> None:
        """Save, if it is time."""
        if _is_due(event.epoch, self._every_epochs):
            value = event.steps if self._monitor is None else self._monitor.read(event)
            if math.isfinite(value):
                self._save(event.steps, value)

    def on_fit_end(self, event: FitEnded) -> None:
        """Save the end of a `fit` that was stopped."""
        if self._monitor is None and event.stopped and event.steps > 0:
            self._save(event.steps, event.steps)

    def _save(self, step: int, value: float) -> None:
        if self.trainer is None:
            return
        before, name = (self._ranked, self._dropped), f"step-{step:08d}"
        others = [each for each in self._ranked if each[1] != name]
        place = sum(not self._is_better(value, other) for other, _ in others)
        if place >= self._keep:
            return
        ranked = [*others[:place], (value, name), *others[place:]]
        # Before the save: the checkpoint must hold itself, and what a run after a crash removes.
        self._ranked = ranked[: self._keep]
        dropped = [*self._dropped, *(other for _, other in ranked[self._keep :])]
        self._dropped = [other for other in dropped if other != name]
        try:
            self.trainer.save(self.path / name)
        except BaseException:
            self._ranked, self._dropped = before
            raise
        if self.is_writer:
            for draft in self.path.glob("step-*.writing"):
                _remove(draft)
            for other in self._dropped:
                _remove(self.path / f"{other}.previous")
                _remove(self.path / other)
        self._dropped = []

    def _is_better(self, value: float, than: float) -> bool:
        if self._monitor is None:
            return value >= than
        return self._monitor.is_better(value, than)

    def state_dict(self) -> dict[str, Any]:  # Any: plain values
        """Return which folders are kept, and their values; and which are to be removed."""
        kept = [[float(value), name] for value, name in self._ranked]
        return {"kept": kept, "dropped": self._dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            ValueError: It holds names that are none of ours; nothing has changed then.
        """
        kept = [(value, name) for value, name in state["kept"]]
        dropped = list(state["dropped"])
        if not all(_NAME.fullmatch(name) for name in [*dropped, *(name for _, name in kept)]):
            raise ValueError(f"`kept` or `dropped` holds other names: {state!r:.200}")
        self._ranked, self._dropped = kept, dropped


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def _remove(folder: Path) -> None:
    """Remove a folder that holds what `Trainer.save` writes, and nothing else."""
    if not folder.is_dir():
        return
    found = list(folder.iterdir())
    if folder.is_symlink() or not all(_FILE.fullmatch(x.name) and not x.is_dir() for x in found):
        warn_user(
            f"{folder} is kept no more, but stays: it is a link, or holds more than a checkpoint.",
        )
        return
    # First the name: a kill from here on leaves a draft, which the next save removes.
    draft = folder.with_suffix(".writing")
    if draft != folder and os.path.lexists(draft):
        warn_user(f"{folder} is kept no more, but stays: {draft} is in the way.")
        return
    folder.rename(draft)
    for path in draft.iterdir():
        path.unlink()
    draft.rmdir()
