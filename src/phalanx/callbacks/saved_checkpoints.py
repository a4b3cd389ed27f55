"""Save a checkpoint every so many epochs or steps, and keep the last ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.callbacks.events import AttachedTrainer, EpochDone, FitEnded, StepDone
from phalanx.callbacks.saved_folders import (
    check_saved_name,
    name_of_step,
    newest_in,
    read_saved_folder,
    remove_checkpoint,
)
from phalanx.plan import read_count

__all__ = ["Checkpoint"]


class Checkpoint:
    """A callback that saves every so many epochs or steps, and keeps the last checkpoints.

    Below ``path`` there are folders such as ``step-00001200``, each for `Trainer.resume`, and each
    whole: a crash while one is written leaves those before. A `fit` that ends by `Trainer.stop` or
    Ctrl-C is saved where it ends. The oldest is removed when another was
    saved, unless it holds something that `Trainer.save` does not write. It is called after the
    other callbacks, and so saves what they have counted.

    Args:
        path: A folder, made when it is needed.
        every_epochs: Save after each epoch whose number this divides; default: 1 without
            ``every_steps``.
        every_steps: Save after each step whose number this divides.
        keep: How many stay.

    Raises:
        ConfigError: An argument cannot work.

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

    saves = True  # see `Callback`

    def __init__(
        self,
        path: str | Path,
        every_epochs: int | None = None,
        every_steps: int | None = None,
        keep: int = 1,
    ) -> None:
        self.path = read_saved_folder("path", path)
        if every_epochs is None and every_steps is None:
            every_epochs = 1
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None:
                read_count(name, value, 1)
        self._every_epochs = every_epochs
        self._every_steps = every_steps
        self._keep = read_count("keep", keep, 1)
        self._kept: list[str] = []  # the newest last
        self._trainer: AttachedTrainer | None = None

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that is there: of this run, else of one before; None for none."""
        ours = [self.path / name for name in self._kept if (self.path / name).is_dir()]
        return ours[-1] if ours else newest_in(self.path)

    def attach(self, trainer: AttachedTrainer) -> None:
        """Save ``trainer``."""
        self._trainer = trainer
        self._kept = []

    def __call__(self, event: object) -> None:
        """Save, if it is time."""
        if self._is_time(event):
            self._save()

    def _is_time(self, event: object) -> bool:
        if isinstance(event, StepDone):
            return _is_due(event.step, self._every_steps)
        if isinstance(event, EpochDone):
            return _is_due(event.epoch, self._every_epochs)
        return isinstance(event, FitEnded) and event.stopped and event.steps > 0

    def _save(self) -> None:
        if self._trainer is None:
            return
        before, name = self._kept, name_of_step(self._trainer.steps)
        names = [*(each for each in before if each != name), name]
        self._kept = names[-self._keep :]  # the checkpoint is to know of itself
        try:
            self._trainer.save(self.path / name)
        except BaseException:
            self._kept = before
            raise
        if self._trainer.is_first_rank:
            for dropped in names[: -self._keep]:
                remove_checkpoint(self.path / dropped)

    def state_dict(self) -> dict[str, Any]:  # Any: plain values
        """Return which folders are kept."""
        return {"kept": list(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: It is nothing of the kind; nothing has changed then.
        """
        self._kept = [check_saved_name(name) for name in state["kept"]]

    def __repr__(self) -> str:
        every = [
            f"every_{name}={value}"
            for name, value in (("epochs", self._every_epochs), ("steps", self._every_steps))
            if value is not None
        ]
        return f"Checkpoint({str(self.path)!r}, {', '.join(every)}, keep={self._keep})"


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0
