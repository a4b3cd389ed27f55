"""What the events of a training leave behind: its curve, its epochs and its last steps in full."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.clock import now_s
from phalanx.execution import WorkerLost
from phalanx.train import EpochDone, StepDone

# One line of metrics.jsonl. Any: JSON.
Record = dict[str, Any]

# Spans are by far the largest part of an event; more steps than this would not fit into a figure.
_NUM_LAST_STEPS = 12


@dataclass
class EpochMeans:
    """The means of one finished epoch; ``last_step`` counts from the beginning of the run."""

    epoch: int
    last_step: int
    train: Mapping[str, float]
    validation: Mapping[str, float] | None


@dataclass
class Totals:
    """Sums over the steps of this process, not of the earlier ones of a resumed run."""

    samples: int = 0
    step_seconds: float = 0.0
    # Steps and whatever lies between two that follow each other, such as loading; not tests.
    training_seconds: float = 0.0
    busy_s: list[float] = field(default_factory=list)
    _previous_end_s: float | None = None

    def add(self, event: StepDone, time_s: float) -> None:
        """Add one step, which ended at ``time_s``."""
        self.samples += event.samples
        self.step_seconds += event.seconds
        begun_s = self._previous_end_s
        self.training_seconds += event.seconds if begun_s is None else time_s - begun_s
        self._previous_end_s = time_s
        if len(self.busy_s) != len(event.busy_s):
            self.busy_s = [0.0] * len(event.busy_s)
        for replica, seconds in enumerate(event.busy_s):
            self.busy_s[replica] += seconds

    def interrupt(self) -> None:
        """Something else than training comes next."""
        self._previous_end_s = None

    def samples_per_s(self) -> float:
        """Return the speed of training by the clock on the wall."""
        return self.samples / self.training_seconds if self.training_seconds else 0.0

    def busy(self) -> list[float]:
        """Return for each replica the fraction of the steps' time in which it worked."""
        return [min(1.0, busy / self.step_seconds) for busy in self.busy_s if self.step_seconds]


class History:
    """Listens to a trainer and keeps what the run folder and the figure need.

    Attributes:
        losses: The loss of each step since the run began; step s is at index s - 1.
        epochs: The finished epochs.
        last_steps: The last few events, with their spans.
        totals: Sums over this process.

    Example:
        >>> history = History()
        >>> history.restore([{"kind": "step", "step": 1, "loss": 2.5}])
        >>> history.losses, history.take_records()
        ([2.5], [])
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[EpochMeans] = []
        self.last_steps: deque[StepDone] = deque(maxlen=_NUM_LAST_STEPS)
        self.totals = Totals()
        self._unwritten: list[Record] = []

    def restore(self, records: Iterable[Record]) -> None:
        """Take over the records that earlier processes of this run wrote."""
        for record in records:
            if record["kind"] == "step":
                self.losses.append(_number(record["loss"]))
            elif record["kind"] == "epoch":
                self.epochs.append(_epoch_of(record))

    def __call__(self, event: object) -> None:
        """Listen to one event; microseconds, as nothing is written here."""
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
            if self.last_steps and len(self.last_steps[-1].shares) != len(event.shares):
                self.last_steps.clear()  # the run was resized, and a figure has one row a replica
            self.last_steps.append(event)
            self.totals.add(event, now_s())
            self._unwritten.append(_step_record(event))
        elif isinstance(event, EpochDone):
            self.totals.interrupt()
            record = _epoch_record(event)
            self.epochs.append(_epoch_of(record))
            self._unwritten.append(record)
        elif isinstance(event, WorkerLost):
            self._unwritten.append({"kind": "failure", **asdict(event)})

    def take_records(self) -> list[Record]:
        """Hand over what has come since the last call."""
        records, self._unwritten = self._unwritten, []
        return records


def _step_record(event: StepDone) -> Record:
    return {
        "kind": "step",
        "step": event.step,
        "epoch": event.epoch,
        "batch": event.batch,
        "loss": event.loss,
        "samples": event.samples,
        "seconds": event.seconds,
        "shares": event.shares,
        "busy_s": event.busy_s,
        "learning_rates": event.learning_rates,
    }


def _epoch_record(event: EpochDone) -> Record:
    return {
        "kind": "epoch",
        "epoch": event.epoch,
        "last_step": event.steps,
        "samples": event.samples,
        "seconds": event.seconds,
        "train": dict(event.train),
        "validation": None if event.validation is None else dict(event.validation),
    }


def _epoch_of(record: Record) -> EpochMeans:
    validation = record["validation"]
    return EpochMeans(
        epoch=record["epoch"],
        last_step=record["last_step"],
        train={name: _number(value) for name, value in record["train"].items()},
        validation=None
        if validation is None
        else {name: _number(value) for name, value in validation.items()},
    )


def _number(value: float | None) -> float:
    """Undo what JSON does to numbers that are not finite: they are null there."""
    return math.nan if value is None else value
