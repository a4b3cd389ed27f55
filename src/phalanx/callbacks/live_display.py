"""The live display of a training, by rich: at the bottom of a terminal, or in a notebook's cell."""

from __future__ import annotations

import sys

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.callbacks.events import StepDone
from phalanx.callbacks.meter import Plan, Reading, describe_rest, of

__all__ = ["LiveDisplay", "can_be_live", "draw_live", "make_console"]

_BAR_WIDTH = 24


def make_console() -> Console:
    """Make a console on stderr, which takes text as it is: it holds names of the user's."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


def can_be_live(console: Console) -> bool:
    """Tell whether what was drawn can be drawn anew there."""
    if not console.is_jupyter:
        return console.is_terminal
    try:
        # Optional: by it rich draws anew in notebooks.
        import ipywidgets  # noqa: F401
    except ImportError:
        return False
    return True


class LiveDisplay:
    """Keeps a bar for the epoch and one for each replica.

    Its caller draws it; it has no thread of its own.
    """

    def __init__(self, console: Console) -> None:
        # What the program prints goes above the display; but not where it is sent elsewhere.
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        self._live.start()

    def show(self, event: StepDone, reading: Reading, plan: Plan) -> None:
        """Draw the last steps."""
        self._live.update(draw_live(event, reading, plan), refresh=True)

    def close(self) -> None:
        """Wipe the display away."""
        self._live.stop()


def _is_terminal(stream: object) -> bool:
    try:
        return stream.isatty()  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, ValueError):  # there is none, or it was closed
        return False


def draw_live(event: StepDone, reading: Reading, plan: Plan) -> RenderableType:
    """Draw the epoch's bar and, below it, what each replica does."""
    return Group(_draw_epoch(event, reading, plan), _draw_replicas(reading))


def _draw_epoch(event: StepDone, reading: Reading, plan: Plan) -> RenderableType:
    total = plan.steps_per_epoch
    done = event.batch
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
        Text(f"epoch {of(event.epoch, plan.epochs)}", style="bold"),
        bar,
        Text(of(done, total)),
        Text.assemble("loss ", (f"{reading.loss:.4f}", "bold cyan")),
        Text.assemble((f"{reading.samples_per_s:,.0f}", "bold"), " samples/s"),
        Text(describe_rest(event, reading, plan), style="dim"),
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
