"""What the last steps amount to, and what happens, in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.callbacks.events import (
    EpochDone,
    FormationChosen,
    RanksChanged,
    StepDone,
    WorkerLost,
)

__all__ = [
    "Meter",
    "Plan",
    "Reading",
    "describe_epoch",
    "describe_formation",
    "describe_loss",
    "describe_ranks",
    "describe_rest",
    "describe_step",
    "format_mean",
    "of",
]

_WINDOW = 64  # steps
_SMOOTHING = 0.9


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the last steps say.

    Args:
        loss: Smoothed over the last steps.
        samples_per_s: By the clock on the wall, with everything that happens between steps.
        shares: For each replica, its fraction of the samples.
        busy: For each replica, the fraction of the steps' time in which it worked.
    """

    loss: float
    samples_per_s: float
    shares: tuple[float, ...]
    busy: tuple[float, ...]


class Meter:
    """Collects steps and says what the last of them amount to."""

    def __init__(self, *, window: int = _WINDOW) -> None:
        self._steps: deque[tuple[StepDone, float]] = deque(maxlen=window)
        self._loss = 0.0
        self._loss_weight = 0.0
        self._samples = 0

    def add(self, event: StepDone, time_s: float) -> None:
        """Take in a step that ended at ``time_s``."""
        if self._steps and len(self._steps[-1][0].shares) != len(event.shares):
            self._steps.clear()  # the run was resized
        self._steps.append((event, time_s))
        self._samples += event.samples
        # An exponential mean that starts at the first loss and not at zero: Adam's bias correction.
        self._loss = _SMOOTHING * self._loss + (1 - _SMOOTHING) * event.loss
        self._loss_weight = _SMOOTHING * self._loss_weight + (1 - _SMOOTHING)

    def end_epoch(self) -> int:
        """Forget the steps but not the loss, as tests take time between two epochs.

        Returns:
            The samples since the last epoch's end. An epoch that a resumed run only finishes has
            more of its own.
        """
        samples, self._samples = self._samples, 0
        self._steps.clear()
        return samples

    def read(self) -> Reading:
        """Sum up the window; there must have been a step since the last epoch."""
        events = [event for event, _ in self._steps]
        samples = sum(event.samples for event in events)
        seconds = sum(event.seconds for event in events)
        num_replicas = len(events[-1].shares)
        return Reading(
            loss=self._loss / self._loss_weight,
            samples_per_s=_ratio(samples, self._seconds_on_the_wall()),
            shares=tuple(
                _ratio(sum(event.shares[replica] for event in events), samples)
                for replica in range(num_replicas)
            ),
            busy=tuple(
                min(1.0, _ratio(sum(event.busy_s[replica] for event in events), seconds))
                for replica in range(num_replicas)
            ),
        )

    def _seconds_on_the_wall(self) -> float:
        first_event, first_end_s = self._steps[0]
        return first_event.seconds + self._steps[-1][1] - first_end_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much there is to do.

    Args:
        epochs: Of the whole run; None where steps decide.
        steps: Of the whole run; None where epochs decide.
        steps_per_epoch: None where the loader has no length.
    """

    epochs: int | None
    steps: int | None
    steps_per_epoch: int | None

    def steps_left(self, event: StepDone) -> int | None:
        """Return how many steps come after that of ``event``; None where nobody knows."""
        ends = []
        if self.epochs is not None and self.steps_per_epoch is not None:
            ends.append((self.epochs - event.epoch + 1) * self.steps_per_epoch - event.batch)
        if self.steps is not None:
            ends.append(self.steps - event.step)
        return min(ends, default=None)


def of(done: int, total: int | None) -> str:
    """Write how many are done of how many.

    Example:
        >>> of(3, 12), of(3, None)
        ('3/12', '3')
    """
    return f"{done}" if total is None else f"{done}/{total}"


def describe_step(event: StepDone, reading: Reading, plan: Plan) -> str:
    """Say in one line where the training is and what the last steps were like."""
    replicas = "; ".join(
        f"replica {replica}: {share:.0%} of samples, {busy:.0%} busy"
        for replica, (share, busy) in enumerate(zip(reading.shares, reading.busy, strict=True))
    )
    return (
        f"epoch {of(event.epoch, plan.epochs)}, "
        f"batch {of(event.batch, plan.steps_per_epoch)}: "
        f"loss {reading.loss:.4f}, {reading.samples_per_s:,.0f} samples/s; {replicas}"
    )


def describe_epoch(event: EpochDone, samples: int, plan: Plan) -> str:
    """Say in one line what an epoch came to; ``samples`` were seen in ``event.seconds``."""
    parts = [*_describe_means(event.train, "")]
    if event.validation is not None:
        parts += _describe_means(event.validation, "validation ")
    speed = _ratio(samples, event.seconds)
    parts.append(f"{speed:,.0f} samples/s")
    number = of(event.epoch, plan.epochs)
    width = 0 if plan.epochs is None else 1 + 2 * len(str(plan.epochs))
    return f"epoch {number:>{width}}: {', '.join(parts)}"


def describe_formation(event: FormationChosen) -> str:
    """Say in one line what `replicas="auto"` came to."""
    replicas = "1 replica" if event.replicas == 1 else f"{event.replicas} replicas"
    threads = "1 thread" if event.intra_op == 1 else f"{event.intra_op} threads"
    return f"Chosen: {replicas} × {threads} ({event.reason})"


def describe_loss(event: WorkerLost) -> str:
    """Say in one line which worker was lost, and that nothing else was."""
    held = "" if event.microbatch is None else f" with microbatch {event.microbatch} in hands"
    return (
        f"Step {event.step}: worker {event.worker} (process {event.pid}) {event.reason}{held}; the "
        f"step was completed {event.seconds * 1e3:.0f} ms later, and another worker starts."
    )


def describe_ranks(event: RanksChanged) -> str:
    """Say in one line which ranks were lost or have come, and which train now."""
    news = [f"rank {rank} was lost" for rank in event.lost]
    news += [f"rank {rank} has come" for rank in event.came]
    now = ", ".join(map(str, event.ranks))
    return f"Step {event.step}: {', '.join(news)}; now there are the ranks {now}."


def format_mean(name: str, value: float) -> str:
    """Write a mean as people read it: accuracies in percent, all else as a number.

    Example:
        >>> format_mean("accuracy", 0.9731), format_mean("loss", 0.07)
        ('97.3 %', '0.0700')
    """
    return f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.4f}"


def _describe_means(means: Mapping[str, float], prefix: str) -> list[str]:
    return [f"{prefix}{name} {format_mean(name, value)}" for name, value in means.items()]


def describe_rest(event: StepDone, reading: Reading, plan: Plan) -> str:
    """Say how long it takes from here on, as far as that is known."""
    steps = plan.steps_left(event)
    if steps is None or not reading.samples_per_s:
        return ""
    seconds = round(steps * event.samples / reading.samples_per_s)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    return f"{left} left"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
