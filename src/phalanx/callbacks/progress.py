"""Progress of a training: a bar on a terminal, and a line for each epoch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.callbacks.callback import Callback, EventHandler
from phalanx.callbacks.events import (
    EpochDone,
    Event,
    FitBegun,
    FitEnded,
    RanksChanged,
    StepDone,
    WorkerLost,
)
from phalanx.clock import now_s

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

_INTERVAL_S = 1 / 8
_MOST_MEANS = 10  # in a line: a confusion matrix has many


class Progress(Callback):
    """A callback that shows each `fit`: a line for each epoch and event, and a bar on a terminal.

    The bar needs no thread. Of several ranks the first one shows.

    Args:
        console: The place to show it; default: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._bar: RichProgress | None = None
        self._last_epoch: int | None = None
        self._next_s = self._epoch_began_s = 0.0
        self._samples = 0  # of the epoch, in this `fit`

    def __call__(self, event: Event) -> None:
        """Show the event, on the first of the ranks."""
        if self.is_writer:
            super().__call__(event)

    def on_fit_begin(self, event: FitBegun) -> None:
        """Print the replicas, and open the bar."""
        self.close()
        if self.trainer is not None:
            self._say(_describe_replicas(len(self.trainer.devices), self.trainer.intra_op))
        self._last_epoch = event.last_epoch
        if self._opened.is_terminal:
            self._bar = _make_bar(self._opened)
            self._bar.add_task("", total=event.steps_per_epoch, epoch="", loss=0.0, speed=0.0)
            self._bar.start()
        self._begin_epoch()

    def on_step_end(self, event: StepDone) -> None:
        """Draw the bar, if it is time."""
        self._samples += event.samples
        if self._bar is not None and now_s() >= self._next_s:
            self._bar.update(
                self._bar.task_ids[0],
                completed=event.batch,
                epoch=_of(event.epoch, self._last_epoch),
                loss=event.loss,
                speed=_ratio(self._samples, now_s() - self._epoch_began_s),
                refresh=True,
            )
            self._next_s = now_s() + _INTERVAL_S

    def on_epoch_end(self, event: EpochDone) -> None:
        """Print a line."""
        self._say(_describe_epoch(event, self._samples, self._last_epoch))
        self._begin_epoch()

    def on_worker_lost(self, event: WorkerLost) -> None:
        """Print a line."""
        held = "" if event.microbatch is None else f" during microbatch {event.microbatch}"
        self._say(
            f"Step {event.step}: worker {event.worker} (process {event.pid}) {event.reason}{held}; "
            f"the step was completed {event.seconds * 1e3:.0f} ms later, and the worker is "
            "replaced."
        )

    def on_ranks_changed(self, event: RanksChanged) -> None:
        """Print a line."""
        news = [f"rank {rank} was lost" for rank in event.lost]
        news += [f"rank {rank} joined" for rank in event.came]
        ranks = ", ".join(map(str, event.ranks))
        self._say(f"Step {event.step}: {', '.join(news)}; ranks {ranks} train.")

    def on_fit_end(self, event: FitEnded) -> None:  # noqa: ARG002
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar; :class:`FitEnded` does it, too."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    @property
    def _opened(self) -> Console:
        if self._console is None:
            self._console = _make_console()
        return self._console

    def _say(self, line: str) -> None:
        self._opened.print(line)

    def _begin_epoch(self) -> None:
        self._samples, self._epoch_began_s, self._next_s = 0, now_s(), 0.0
        if self._bar is not None:
            self._bar.reset(self._bar.task_ids[0])


def progress_for(wanted: bool | None, callbacks: Sequence[EventHandler]) -> Progress | None:
    """Return the display of a `fit` with these ``callbacks``; None where one of them shows it.

    Args:
        wanted: Whether it is shown; None: on a terminal and in a notebook.
    """
    if wanted is False or any(isinstance(each, Progress) for each in callbacks):
        return None
    return Progress() if wanted or _is_watched() else None


def _is_watched() -> bool:
    """Tell whether stderr is a terminal, or this is a notebook."""
    if _is_terminal(sys.stderr):
        return True
    return "IPython" in sys.modules and _make_console().is_jupyter


def _is_terminal(stream: object) -> bool:
    try:
        return stream.isatty()  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, ValueError):  # there is none, or it was closed
        return False


def _make_console() -> Console:
    # Slow: rich, which no worker process needs.
    from rich.console import Console

    # Text is taken as it is, because it holds names of the user's.
    return Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _make_bar(console: Console) -> RichProgress:
    # Slow, as above.
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:,.0f} samples/s"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        # The program's own prints go above the bar; but not where they are sent elsewhere.
        redirect_stdout=_is_terminal(sys.stdout),
        redirect_stderr=_is_terminal(sys.stderr),
    )


def _of(done: int, total: int | None) -> str:
    return f"{done}" if total is None else f"{done}/{total}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _describe_epoch(event: EpochDone, samples: int, last_epoch: int | None) -> str:
    means = [*_describe_means(event.train, "")]
    if event.validation is not None:
        means += _describe_means(event.validation, "validation ")
    width = 0 if last_epoch is None else 1 + 2 * len(str(last_epoch))
    number = _of(event.epoch, last_epoch)
    speed = _ratio(samples, event.seconds)
    return f"epoch {number:>{width}}: {', '.join(means)}, {speed:,.0f} samples/s"


def _describe_means(means: Mapping[str, float], prefix: str) -> list[str]:
    shown = [f"{prefix}{name} {format_mean(name, value)}" for name, value in means.items()]
    more = len(shown) - _MOST_MEANS
    return shown if more <= 0 else [*shown[:_MOST_MEANS], f"{more} more"]


def format_mean(name: str, value: float) -> str:
    """Write a mean as people read it: accuracies in percent, all else as a number.

    Example:
        >>> format_mean("accuracy", 0.9731), format_mean("loss", 0.07)
        ('97.3 %', '0.0700')
    """
    return f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.4f}"


def _describe_replicas(count: int, intra_op: int) -> str:
    replicas = "1 replica" if count == 1 else f"{count} replicas"
    return f"{replicas} × {'1 thread' if intra_op == 1 else f'{intra_op} threads'}"
