"""What a trainer tells its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.distributed import RanksChanged
from phalanx.execution import ExecutorChoice, FailureLog, Span, WorkerLost

__all__ = [
    "Callback",
    "EpochDone",
    "Event",
    "EventDispatcher",
    "FormationChosen",
    "RanksChanged",
    "Span",
    "StepDone",
    "WorkerLost",
]


@dataclass(frozen=True, kw_only=True)
class FormationChosen:
    """How many replicas with how many threads each will train, and why."""

    replicas: int
    intra_op: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One optimizer update is done.

    Attributes:
        step: How many are done, this one included.
        epoch: Number of the running epoch, from 0.
        batch: Number of the batch within the epoch, from 0.
        loss: Loss of the whole batch.
        samples: Rows of the batch.
        seconds: From the batch at hand to the updated weights.
        shares: Rows that each replica computed; with executor="ranks", here and below, this rank's.
        busy_s: Seconds of each replica's spans: its microbatches, and its part of sum and step.
        spans: What each replica did when, by the monotonic clock.
        work_s: Seconds that each replica took for its microbatches alone, until their gradients
            were there, without what it waited for others.
        grad_norm: The 2-norm of all gradients before they were clipped; None without `clip_norm`.
        learning_rates: Of each of the optimizer's parameter groups, as the step was made with it;
            nan where the group has none that is a number.
    """

    step: int
    epoch: int
    batch: int
    loss: float
    samples: int
    seconds: float
    shares: tuple[int, ...]
    busy_s: tuple[float, ...]
    spans: tuple[Span, ...]
    work_s: tuple[float, ...] = ()
    grad_norm: float | None = None
    learning_rates: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EpochDone:
    """One pass over the loader is done.

    Attributes:
        epoch: Its number, from 0.
        steps: Steps done since the beginning.
        samples: Rows of this epoch.
        seconds: Of this epoch, without validation.
        train: "loss" (weighted mean over the epoch's steps) and the metrics, as the weights were
            then.
        validation: The same of the validation loader after the epoch; None without one.
    """

    epoch: int
    steps: int
    samples: int
    seconds: float
    train: Mapping[str, float]
    validation: Mapping[str, float] | None


Event = FormationChosen | StepDone | EpochDone | WorkerLost | RanksChanged
Callback = Callable[[Event], None]


class EventDispatcher:
    """Calls callbacks with what has happened.

    Args:
        callbacks: Called with every event.
        choice: What was given as ``executor=``: `on_failure` is called with every loss of a worker
            before them, and the ranks may change.
        failures: Where losses are noted.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        choice: ExecutorChoice,
        failures: FailureLog,
    ) -> None:
        self._elastic = choice.elastic
        self._callbacks = tuple(callbacks)
        self._on_failure = choice.options.on_failure
        self._failures = failures

    def tell(self, event: Event) -> None:
        """Tell of ``event``, and before a step of the workers and ranks that were lost in it.

        Callbacks hear of every step that is done, whatever telling of a loss raises.
        """
        try:
            if isinstance(event, StepDone):
                self.tell_of_failures(event.step)
                changed = self._elastic and self._elastic.take_change(event.step)
                if changed:
                    self.tell(changed)
        finally:
            for callback in self._callbacks:
                callback(event)

    def tell_of_failures(self, step: int) -> None:
        """Tell of the workers that were lost since the last time, in update ``step``."""
        for lost in self._failures.take(step):
            if self._on_failure is not None:
                self._on_failure(lost)
            self.tell(lost)
