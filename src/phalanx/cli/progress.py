"""What is seen of a training: a live display on a terminal, plain lines elsewhere; then a table.

The first two listen to the trainer's events. Between two redraws an event costs a few microseconds:
it is added to a window, and everything that is shown is computed from it when it is drawn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.cli.history import EpochMeans, Totals
from phalanx.clock import now_s
from phalanx.execution import WorkerLost
from phalanx.train import EpochDone, FormationChosen, StepDone

_WINDOW = 64  # steps
# Drawing may take this share of the time, however slow the terminal: training is what counts.
_MAX_DRAWING_SHARE = 0.05
_SMOOTHING = 0.9
_BAR_WIDTH = 24


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
        epochs: Of the whole run.
        steps_per_epoch: None where the loader has no length.
    """

    epochs: int
    steps_per_epoch: int | None


class Progress:
    """Listens to a trainer's events and prints what stays: a line per epoch, and what happens.

    Args:
        interval_s: Seconds from one showing of the last steps to the next, at least.
    """

    INTERVAL_S: ClassVar[float]

    def __init__(
        self,
        console: Console,
        plan: Plan,
        *,
        interval_s: float | None = None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._console = console
        self._plan = plan
        self._interval_s = self.INTERVAL_S if interval_s is None else interval_s
        self._clock = clock
        self._meter = Meter()
        self._next_s = 0.0

    def __call__(self, event: object) -> None:
        """Take in one event and show it if it is time."""
        if isinstance(event, StepDone):
            time_s = self._clock()
            self._meter.add(event, time_s)
            if time_s >= self._next_s:
                self._show(event, time_s)
        elif isinstance(event, EpochDone):
            self.say(describe_epoch(event, self._meter.end_epoch(), self._plan))
            self._next_s = self._clock() + self._interval_s
        elif isinstance(event, FormationChosen):
            self.say(describe_formation(event))
        elif isinstance(event, WorkerLost):
            self.say(describe_loss(event))

    def _show(self, event: StepDone, time_s: float) -> None:
        raise NotImplementedError

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line)

    def __enter__(self) -> Self:
        """Begin to show."""
        return self

    def __exit__(self, *error: object) -> None:
        """Put the terminal back."""


def choose_progress(console: Console, plan: Plan) -> Progress:
    """Choose the display that suits where the console leads."""
    return LiveProgress(console, plan) if console.is_terminal else PlainProgress(console, plan)


class PlainProgress(Progress):
    """Prints a line about every two seconds, for files and pipes."""

    INTERVAL_S = 2.0

    def __enter__(self) -> Self:
        self._next_s = self._clock() + self._interval_s
        return self

    def _show(self, event: StepDone, time_s: float) -> None:  # noqa: ARG002
        self.say(describe_step(event, self._meter.read(), self._plan))
        self._next_s = self._clock() + self._interval_s


class LiveProgress(Progress):
    """Keeps a bar for the epoch and one for each replica at the bottom of a terminal.

    Drawn from the trainer's events and from no thread of its own, at most eight times a second.
    """

    INTERVAL_S = 1 / 8

    def __enter__(self) -> Self:
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def _show(self, event: StepDone, time_s: float) -> None:
        self._live.update(draw_live(event, self._meter.read(), self._plan), refresh=True)
        ended_s = self._clock()
        rest_s = (ended_s - time_s) / _MAX_DRAWING_SHARE
        self._next_s = ended_s + max(self._interval_s, rest_s)


def describe_step(event: StepDone, reading: Reading, plan: Plan) -> str:
    """Say in one line where the training is and what the last steps were like."""
    steps = "" if plan.steps_per_epoch is None else f"/{plan.steps_per_epoch}"
    replicas = "; ".join(
        f"replica {replica}: {share:.0%} of samples, {busy:.0%} busy"
        for replica, (share, busy) in enumerate(zip(reading.shares, reading.busy, strict=True))
    )
    return (
        f"epoch {event.epoch + 1}/{plan.epochs}, batch {event.batch + 1}{steps}: "
        f"loss {reading.loss:.4f}, {reading.samples_per_s:,.0f} samples/s; {replicas}"
    )


def describe_epoch(event: EpochDone, samples: int, plan: Plan) -> str:
    """Say in one line what an epoch came to; ``samples`` were seen in ``event.seconds``."""
    width = len(str(plan.epochs))
    parts = [*_describe_means(event.train, "")]
    if event.validation is not None:
        parts += _describe_means(event.validation, "test ")
    speed = _ratio(samples, event.seconds)
    parts.append(f"{speed:,.0f} samples/s")
    return f"epoch {event.epoch + 1:{width}}/{plan.epochs}: {', '.join(parts)}"


def describe_formation(event: FormationChosen) -> str:
    """Say in one line what ``--replicas auto`` came to."""
    replicas = "1 replica" if event.replicas == 1 else f"{event.replicas} replicas"
    threads = "1 thread" if event.intra_op == 1 else f"{event.intra_op} threads"
    return f"Formation: {replicas} × {threads} ({event.reason})"


def describe_loss(event: WorkerLost) -> str:
    """Say in one line which worker was lost, and that nothing else was."""
    held = "" if event.microbatch is None else f" with microbatch {event.microbatch} in hands"
    return (
        f"Step {event.step}: worker {event.worker} (process {event.pid}) {event.reason}{held}; the "
        f"step was completed {event.seconds * 1e3:.0f} ms later, and another worker starts."
    )


def format_mean(name: str, value: float) -> str:
    """Write a mean as people read it: accuracies in percent, all else as a number.

    Example:
        >>> format_mean("accuracy", 0.9731), format_mean("loss", 0.07)
        ('97.3 %', '0.0700')
    """
    return f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.4f}"


def _describe_means(means: Mapping[str, float], prefix: str) -> list[str]:
    return [f"{prefix}{name} {format_mean(name, value)}" for name, value in means.items()]


def draw_live(event: StepDone, reading: Reading, plan: Plan) -> RenderableType:
    """Draw the epoch's bar and, below it, what each replica does."""
    return Group(_draw_epoch(event, reading, plan), _draw_replicas(reading))


def _draw_epoch(event: StepDone, reading: Reading, plan: Plan) -> RenderableType:
    total = plan.steps_per_epoch
    done = event.batch + 1
    bar = ProgressBar(
        total=total,
        completed=done,
        width=_BAR_WIDTH,
        pulse=total is None,
        complete_style="cyan",
        finished_style="cyan",
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(f"epoch {event.epoch + 1}/{plan.epochs}", style="bold"),
        bar,
        Text(f"{done}" if total is None else f"{done}/{total}"),
        Text.assemble("loss ", (f"{reading.loss:.4f}", "bold cyan")),
        Text.assemble((f"{reading.samples_per_s:,.0f}", "bold"), " samples/s"),
        Text(_describe_rest(event, reading, plan), style="dim"),
    )
    return grid


def _draw_replicas(reading: Reading) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for replica, (share, busy) in enumerate(zip(reading.shares, reading.busy, strict=True)):
        grid.add_row(
            Text(f"  replica {replica}", style="dim"),
            ProgressBar(
                total=1.0,
                completed=busy,
                width=_BAR_WIDTH - 4,
                complete_style="green",
                finished_style="green",
            ),
            Text(f"{busy:4.0%} busy"),
            Text(f"{share:4.0%} of samples", style="dim"),
        )
    return grid


def _describe_rest(event: StepDone, reading: Reading, plan: Plan) -> str:
    """Say how long it takes from here on, as far as the length of an epoch and the speed tell."""
    if plan.steps_per_epoch is None or not reading.samples_per_s:
        return ""
    steps = (plan.epochs - event.epoch) * plan.steps_per_epoch - event.batch - 1
    seconds = round(steps * event.samples / reading.samples_per_s)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    return f"{left} left"


def draw_summary(
    last: EpochMeans | None,
    totals: Totals,
    *,
    seconds: float,
    devices: Sequence[str],
    is_text: bool,
) -> RenderableType:
    """Draw what the training came to.

    Args:
        last: The last finished epoch, or None if there is none yet.
        totals: Of this process.
        seconds: What this process spent on training and testing.
        devices: Where each replica was.
        is_text: Show the perplexity, e to the loss.
    """
    table = Table()
    for heading in ("", "train", "test"):
        table.add_column(heading, justify="left" if not heading else "right", min_width=10)
    for name, train, test in _mean_rows(last, is_text=is_text):
        table.add_row(name, train, test)
    table.add_section()
    table.add_row("samples/s", f"{totals.samples_per_s():,.0f}", "")
    table.add_row("seconds", f"{seconds:.1f}", "")
    for replica, (device, busy) in enumerate(zip(devices, totals.busy(), strict=False)):
        table.add_row(f"replica {replica} on {device} busy", f"{busy:.0%}", "")
    return table


def _mean_rows(last: EpochMeans | None, *, is_text: bool) -> list[tuple[str, str, str]]:
    if last is None:
        return [("loss", "no epoch yet", "")]
    train, test = dict(last.train), dict(last.validation or {})
    if is_text:
        for means in (train, test):
            if "loss" in means:
                means["perplexity"] = math.exp(min(means["loss"], 700.0))
    names = dict.fromkeys([*train, *test])
    return [
        (name, _format_cell(name, train.get(name)), _format_cell(name, test.get(name)))
        for name in names
    ]


def _format_cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if name == "perplexity" else format_mean(name, value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
