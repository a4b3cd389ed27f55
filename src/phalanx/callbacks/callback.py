"""The base class of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.callbacks.events import (
    EpochDone,
    Event,
    FitBegun,
    FitEnded,
    RanksChanged,
    StepDone,
    WorkerLost,
)

EventHandler = Callable[[Event], None]
"""A `Callback`, or any function of an event: a `Trainer` takes both."""


class Callback:
    """Base of callbacks: override the methods of the events that you need.

    A `Trainer` calls its callbacks in their order, in the process that has the trainer, between two
    steps. One that raises ends `fit`; the steps before stay done. `state_dict` and
    `load_state_dict`, where they are overridden, carry a state through checkpoints.

    Attributes:
        trainer: The trainer; None before one is made with this callback.
        saves: True for a callback that saves the trainer: it is called after the others, so that
            the checkpoint holds their state after the event.

    Example:
        >>> import torch, phalanx
        >>> class Count(Callback):
        ...     steps = 0
        ...
        ...     def on_step_end(self, event):
        ...         self.steps += 1
        >>> count, data = Count(), [(torch.ones(4, 3), torch.zeros(4, 1))] * 3
        >>> sgd = lambda params: torch.optim.SGD(params, lr=0.1)
        >>> with phalanx.Trainer(
        ...     torch.nn.Linear(3, 1), torch.nn.MSELoss(), sgd, replicas=1, callbacks=[count]
        ... ) as trainer:
        ...     epochs = trainer.fit(data, epochs=2)
        >>> count.steps
        6
    """

    saves = False
    trainer: Any = None  # a `Trainer`, which imports this package

    def attach(self, trainer: Any) -> None:
        """Belong to ``trainer`` from here on; called when it is made."""
        self.trainer = trainer

    @property
    def is_writer(self) -> bool:
        """True where this process writes files and prints: on the first of the ranks."""
        return self.trainer is None or self.trainer.is_first_rank

    def on_fit_begin(self, event: FitBegun) -> None:
        """Called before the first step of a `fit`."""

    def on_step_end(self, event: StepDone) -> None:
        """Called after each update."""

    def on_validation_end(self, event: EpochDone) -> None:
        """Called after an epoch that had a validation, before :meth:`on_epoch_end`."""

    def on_epoch_end(self, event: EpochDone) -> None:
        """Called after each epoch and its validation."""

    def on_worker_lost(self, event: WorkerLost) -> None:
        """Called before :meth:`on_step_end` of a step in which a worker process was lost."""

    def on_ranks_changed(self, event: RanksChanged) -> None:
        """Called before :meth:`on_step_end` of a step in which a rank was lost or joined."""

    def on_fit_end(self, event: FitEnded) -> None:
        """Called at the end of a `fit`, after an error, too."""

    def state_dict(self) -> dict[str, Any]:  # Any: tensors and plain values
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""

    def __call__(self, event: Event) -> None:
        """Call the method of ``event``."""
        if isinstance(event, StepDone):
            self.on_step_end(event)
        elif isinstance(event, EpochDone):
            if event.validation is not None:
                self.on_validation_end(event)
            self.on_epoch_end(event)
        elif isinstance(event, FitBegun):
            self.on_fit_begin(event)
        elif isinstance(event, FitEnded):
            self.on_fit_end(event)
        elif isinstance(event, WorkerLost):
            self.on_worker_lost(event)
        elif isinstance(event, RanksChanged):
            self.on_ranks_changed(event)
