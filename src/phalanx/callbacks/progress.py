"""What is seen of a training: a live display where somebody looks on, plain lines elsewhere.

It listens to the trainer's events. Between two redraws an event costs a few microseconds: it is
added to a window, and everything that is shown is computed from it when it is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from phalanx.callbacks.events import (
    AttachedTrainer,
    Callback,
    EpochDone,
    FitBegun,
    FitEnded,
    FormationChosen,
    RanksChanged,
    StepDone,
    WorkerLost,
)
from phalanx.callbacks.meter import (
    Meter,
    Plan,
    Reading,
    describe_epoch,
    describe_formation,
    describe_loss,
    describe_ranks,
    describe_step,
)
from phalanx.clock import now_s
from phalanx.plan import check_choice

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "progress_for"]

_PLAIN_INTERVAL_S = 2.0
_LIVE_INTERVAL_S = 1 / 8
# Drawing may take this share of the time, however slow the terminal: training is what counts.
_MAX_DRAWING_SHARE = 0.05


class Display(Protocol):
    """Where the last steps are shown."""

    def show(self, event: StepDone, reading: Reading, plan: Plan) -> None:
        """Show them in the place of those before."""

    def close(self) -> None:
        """Put the screen back."""


class Progress:
    """A callback that shows each `fit`: a line per epoch, what happens, and how far it is.

    On a terminal a bar for the epoch and one for each replica stay at the bottom; so they do in a
    notebook that has ``ipywidgets``. Elsewhere there is a plain line about every two seconds. On
    ranks the first one shows.

    Args:
        console: Where to; default: stderr.
        interval_s: Seconds from one showing of the last steps to the next, at least.
        clock: Tells the seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        interval_s: float | None = None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._console = console
        self._interval_s = interval_s
        self._clock = clock
        self._trainer: AttachedTrainer | None = None
        self._display: Display | None = None
        self._meter = Meter()
        self._plan = Plan(epochs=None, steps=None, steps_per_epoch=None)
        self._next_s = self._pause_s = 0.0

    def attach(self, trainer: AttachedTrainer) -> None:
        """Show the training of ``trainer``."""
        self._trainer = trainer

    def __call__(self, event: object) -> None:
        """Take in one event and show it if it is time."""
        if isinstance(event, StepDone):
            if self._display is not None:
                self._take(event, self._display)
        elif self._trainer is not None and not self._trainer.is_first_rank:
            pass
        elif isinstance(event, FitBegun):
            self._begin(event)
        elif isinstance(event, FitEnded):
            self.close()
        elif isinstance(event, EpochDone):
            self.say(describe_epoch(event, self._meter.end_epoch(), self._plan))
            self._next_s = self._clock() + self._pause_s
        elif isinstance(event, FormationChosen):
            self.say(describe_formation(event))
        elif isinstance(event, WorkerLost):
            self.say(describe_loss(event))
        elif isinstance(event, RanksChanged):
            self.say(describe_ranks(event))

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._open_console().print(line)

    def close(self) -> None:
        """Put the screen back; :class:`FitEnded` does it, too."""
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def _open_console(self) -> Console:
        if self._console is None:
            # Slow: rich, which no worker process needs.
            from phalanx.callbacks.live_display import make_console

            self._console = make_console()
        return self._console

    def _begin(self, event: FitBegun) -> None:
        # Slow, as above.
        from phalanx.callbacks.live_display import LiveDisplay, can_be_live

        self.close()
        self._meter = Meter()
        self._plan = Plan(
            epochs=event.last_epoch,
            steps=event.last_step,
            steps_per_epoch=event.steps_per_epoch,
        )
        console = self._open_console()
        is_live = can_be_live(console)
        self._display = LiveDisplay(console) if is_live else PlainLines(console)
        usual_s = _LIVE_INTERVAL_S if is_live else _PLAIN_INTERVAL_S
        self._pause_s = usual_s if self._interval_s is None else self._interval_s
        self._next_s = 0.0 if is_live else self._clock() + self._pause_s

    def _take(self, event: StepDone, display: Display) -> None:
        time_s = self._clock()
        self._meter.add(event, time_s)
        if time_s >= self._next_s:
            display.show(event, self._meter.read(), self._plan)
            ended_s = self._clock()
            self._next_s = ended_s + max(self._pause_s, (ended_s - time_s) / _MAX_DRAWING_SHARE)


class PlainLines:
    """Prints a line about the last steps, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, event: StepDone, reading: Reading, plan: Plan) -> None:
        """Print the line."""
        self._console.print(describe_step(event, reading, plan))

    def close(self) -> None:
        """Leave the lines as they are."""


def progress_for(wanted: bool | None, callbacks: Sequence[Callback]) -> Progress | None:
    """Return what a `fit` shows beside its ``callbacks``; None where one of them shows it.

    Args:
        wanted: Whether it is shown; None: where somebody looks on.
    """
    check_choice("progress", wanted)
    if wanted is False or any(isinstance(each, Progress) for each in callbacks):
        return None
    return Progress() if wanted or _is_watched() else None


def _is_watched() -> bool:
    """Tell whether stderr is a terminal, or this is a notebook."""
    try:
        if sys.stderr.isatty():
            return True
    except (AttributeError, ValueError):  # there is none, or it was closed
        return False
    if "IPython" not in sys.modules:
        return False
    # Slow, as above.
    from phalanx.callbacks.live_display import make_console

    return make_console().is_jupyter
