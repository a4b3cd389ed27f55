"""The page of a report: tables and charts of runs in one template, which escapes all text."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from phalanx import __version__
from phalanx.callbacks import Record
from phalanx.cli.reporting.comparison import compare_losses, compare_settings, final_values
from phalanx.cli.reporting.runs import Floats, RecordedRun, number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MARK", "make_page"]

MARK = "<!doctype html>\n<!-- phalanx report -->\n"
"""The beginning of every report."""

_ASSETS = Path(__file__).parents[1] / "assets"
_COLOURS = ("#2563a8", "#d9661f", "#2f8f5b", "#9a4db8", "#148a94", "#b8860b", "#c8457d", "#5b6b7c")
_MOST_POINTS = 1000  # of a curve: more are not told apart
_LOG_RATIO = 20.0  # from here on a linear axis shows only the beginning of a loss
# Any: matplotlib lists the type of each of its hundreds of settings.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "phalanx",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
}


def make_page(runs: Sequence[RecordedRun]) -> str:
    """Return the page about ``runs``, one at least."""
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    names = [run.name for run in runs]
    found = [final_values(run) for run in runs]
    results = {
        name: [values.get(name, "–") for values in found]
        for name in dict.fromkeys(name for values in found for name in values)
    }
    if len(runs) > 1:
        beside = [compare_losses(runs[0], run) for run in runs[1:]]
        results[f"losses beside {names[0]}"] = ["–", *beside]
    differing, settings = compare_settings(runs)
    return environment.get_template("report.html").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        names=names,
        colours=[_COLOURS[number % len(_COLOURS)] for number in range(len(runs))],
        results=results,
        charts=_draw_charts(runs),
        events=[event for run in runs for event in _events_of(run)],
        differing=differing,
        settings=settings,
        version=__version__,
    )


def _draw_charts(runs: Sequence[RecordedRun]) -> str:
    """Return all charts as one SVG."""
    # Late, because it takes half a second.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    means = dict.fromkeys(name for run in runs for name in run.names_of_means() if name != "loss")
    titles = ["loss", *means, "learning rate", "samples per second"]
    if any(np.isfinite(run.numbers("grad_norm")).any() for run in runs):
        titles.append("norm of the gradients")
    rows = (len(titles) + 1) // 2
    with rc_context(_STYLE):
        figure = Figure(figsize=(12, 3.2 * rows), layout="constrained")
        axes = list(figure.subplots(rows, 2, squeeze=False).flat)
        for title, each in zip(titles, axes, strict=False):
            each.set_title(title, parse_math=False)
        by_title = dict(zip(titles, axes, strict=False))
        for number, run in enumerate(runs):
            _draw_run(run, _COLOURS[number % len(_COLOURS)], by_title)
        for spare in axes[len(titles) :]:
            spare.remove()
        low, high = axes[0].dataLim.intervaly
        if low > 0 and high > _LOG_RATIO * low:
            axes[0].set_yscale("log")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "<svg" + text.getvalue().partition("<svg")[2]


def _draw_run(run: RecordedRun, colour: str, axes: dict[str, Axes]) -> None:
    steps, ends = run.numbers("step"), run.numbers_of_epochs("last_step")
    _draw_line(axes["loss"], steps, run.numbers("loss"), colour)
    for name in run.names_of_means():
        if name != "loss":
            axes[name].plot(ends, run.means("train", name), color=colour)
        axes[name].plot(ends, run.means("validation", name), "o", color=colour, ms=4)
    rates = run.lists("learning_rates")
    for group in range(max(map(len, rates))):
        own = np.array([each[group] if group < len(each) else np.nan for each in rates])
        _draw_line(axes["learning rate"], steps, own, colour)
    if "norm of the gradients" in axes:
        _draw_line(axes["norm of the gradients"], steps, run.numbers("grad_norm"), colour)
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = run.numbers("samples") / run.numbers("seconds")
    _draw_line(axes["samples per second"], steps, speed, colour)
    for failure in run.failures:
        axes["loss"].axvline(failure["step"], color="#d1242f", linewidth=0.8)


def _draw_line(axes: Axes, x: Floats, y: Floats, colour: str) -> None:
    stride = math.ceil(len(x) / _MOST_POINTS)
    axes.plot(x[::stride], y[::stride], color=colour, linewidth=0.9)


def _events_of(run: RecordedRun) -> list[dict[str, str]]:
    found = []
    for event in sorted([*run.failures, *run.changes], key=lambda each: each["step"]):
        happened, recovery = _in_words(event)
        found.append(
            {
                "run": run.name,
                "step": f"{event['step']:,}",
                "happened": happened,
                "recovery": recovery,
                "dump": str(event.get("dump") or ""),
            }
        )
    return found


def _in_words(event: Record) -> tuple[str, str]:
    if event["kind"] == "ranks":
        lost, came, now = (_texts_of(event.get(name)) for name in ("lost", "came", "ranks"))
        news = [f"rank {rank} was lost" for rank in lost] + [f"rank {rank} joined" for rank in came]
        return ", ".join(news), f"ranks {', '.join(now)} train"
    held = event.get("microbatch")
    computing = "" if held is None else f" during microbatch {held}"
    seconds = number_of(event.get("seconds"))
    later = f" {1e3 * seconds:.0f} ms later" if math.isfinite(seconds) else ""
    happened = f"worker {event.get('worker')} (process {event.get('pid')}) {event.get('reason')}"
    return f"{happened}{computing}", f"the step was completed{later}; the worker was replaced"


def _texts_of(value: Any) -> list[str]:  # Any: JSON
    return [str(each) for each in value] if isinstance(value, list) else []
