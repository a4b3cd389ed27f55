"""The page of ``phalanx report``: runs as they were written down, their tables and charts.

One template, which escapes all text, and an SVG by matplotlib for each chart.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from phalanx import __version__
from phalanx.callbacks import Record, format_mean, read_record
from phalanx.cli.run_folder import RunFolder
from phalanx.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ASSETS = Path(__file__).parent / "assets"
_COLOURS = ("#2563a8", "#d9661f", "#2f8f5b", "#9a4db8", "#148a94", "#b8860b", "#c8457d", "#5b6b7c")
_INCHES = (4.6, 3.0)  # of a chart: its text is read on a phone
_MOST_POINTS = 1000  # of a curve: more are not told apart
_LOG_RATIO = 20.0  # from here on a linear axis shows only the beginning of a loss
_LONGEST = 300  # of a setting's value
_NONE = "–"
# Any: matplotlib lists the type of each of its hundreds of settings.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "phalanx",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One run.

    Attributes:
        steps: Records of its steps, one at least, in order.
        epochs: Of its epochs.
        events: Of lost workers, and of ranks that were lost or came.
        config: What config.json holds; empty without one.
        weights: The beginning of a hash of the trained weights' file; a dash without one.
    """

    name: str
    steps: Sequence[Record]
    epochs: Sequence[Record] = ()
    events: Sequence[Record] = ()
    config: Mapping[str, Any]  # Any: JSON
    weights: str = _NONE

    def numbers(self, name: str) -> Floats:
        """Return a number of each step; nan where it is missing."""
        return _numbers(step.get(name) for step in self.steps)

    def means(self, kind: str, name: str) -> Floats:
        """Return a "train" or "validation" mean of each epoch; nan where it is missing."""
        return _numbers((epoch.get(kind) or {}).get(name) for epoch in self.epochs)

    def names_of_means(self) -> list[str]:
        """Return the names of the epochs' means, those of training first."""
        kinds = [epoch.get(kind) or {} for kind in ("train", "validation") for epoch in self.epochs]
        return list(dict.fromkeys(name for means in kinds for name in means))


def _numbers(values: Any) -> Floats:
    return np.array([math.nan if each is None else each for each in values], dtype=np.float64)


def read_run(path: Path) -> RecordedRun:
    """Read a run folder, or a file of `JSONL`.

    Raises:
        ConfigError: It is no run, or has no step yet.
        CheckpointError: A file of it is damaged.
    """
    folder = RunFolder(path)
    metrics_path = folder.metrics_path if path.is_dir() else path
    if not metrics_path.is_file():
        raise ConfigError(
            f"`RUN` must be a run folder or a file of `JSONL`, but {str(metrics_path)!r} is not "
            "there. Name what `phalanx train` has written."
        )
    by_kind: dict[str, list[Record]] = {"step": [], "epoch": [], "failure": [], "ranks": []}
    for record in _read_records(metrics_path):
        by_kind[record["kind"]].append(record)
    if not by_kind["step"]:
        raise ConfigError(f"`RUN` must have done a step, but {str(metrics_path)!r} has none.")
    weights = _NONE
    if folder.model_path.is_file():
        weights = hashlib.sha256(folder.model_path.read_bytes()).hexdigest()[:12]
    return RecordedRun(
        name=path.resolve().name,
        steps=sorted(by_kind["step"], key=lambda record: record["step"]),
        epochs=by_kind["epoch"],
        events=sorted([*by_kind["failure"], *by_kind["ranks"]], key=lambda each: each["step"]),
        config=folder.read_config() if folder.config_path.is_file() else {},
        weights=weights,
    )


def _read_records(path: Path) -> list[Record]:
    """Read a file of `JSONL`; the last line of a run under way may be torn."""
    lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(read_record(line))
        except ValueError as error:
            if number < len(lines):
                raise CheckpointError(
                    f"Line {number} of {path} must be a step or an epoch, but is {line[:80]!r}."
                ) from error
    return records


# -- tables ----------------------------------------------------------


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
    results = _beside([final_values(run) for run in runs])
    if len(runs) > 1:
        others = [compare_losses(runs[0], run) for run in runs[1:]]
        results[f"losses beside {names[0]}"] = [_NONE, *others]
    settings = _beside([_settings_of(run.config) for run in runs])
    differing = {name: values for name, values in settings.items() if len(set(values)) > 1}
    return environment.get_template("report.html").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        names=names,
        colours=[_COLOURS[number % len(_COLOURS)] for number in range(len(runs))],
        results=results,
        charts=_draw_charts(runs),
        events=[_in_words(event) | {"run": run.name} for run in runs for event in run.events],
        differing=differing,
        settings={name: each for name, each in settings.items() if name not in differing},
        version=__version__,
    )


def _beside(tables: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name, _NONE) for table in tables] for name in names}


def final_values(run: RecordedRun) -> dict[str, str]:
    """Return what a run came to, by name."""
    seconds, samples = np.nansum(run.numbers("seconds")), np.nansum(run.numbers("samples"))
    found = {
        "steps": f"{len(run.steps):,}",
        "epochs": f"{len(run.epochs):,}",
        "loss of the last step": format_mean("loss", run.numbers("loss")[-1]),
    }
    for name in run.names_of_means():
        for kind in ("train", "validation"):
            means = run.means(kind, name)
            if np.isfinite(means).any():
                found[f"{kind} {name}"] = format_mean(name, float(means[-1]))
    validation = run.means("validation", "loss")
    if np.isfinite(validation).any():
        best = int(np.nanargmin(validation))
        epoch = run.epochs[best]["epoch"]
        found["best validation loss"] = f"{validation[best]:.4f} (epoch {epoch})"
    replicas = dict.fromkeys(len(step["shares"]) for step in run.steps if step.get("shares"))
    return found | {
        "seconds in steps": f"{seconds:,.1f}",
        "samples/s in steps": f"{samples / seconds:,.0f}" if seconds else _NONE,
        "replicas": ", ".join(map(str, replicas)) or _NONE,
        "lost workers": f"{sum(each['kind'] == 'failure' for each in run.events):,}",
        "weights": run.weights,
    }


def compare_losses(first: RecordedRun, other: RecordedRun) -> str:
    """Say up to which step two runs had the same losses, to the last bit.

    Example:
        >>> def run(*losses):
        ...     steps = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        ...     return RecordedRun(name="a", steps=steps, config={})
        >>> compare_losses(run(2.0, 1.0), run(2.0, 1.0, 0.5))
        'bitwise equal in all 2 common steps'
        >>> compare_losses(run(2.0, 1.0), run(2.0, 1.5))
        'different from step 2 on: 1.5 beside 1.0'
    """
    ours, theirs = ({each["step"]: each["loss"] for each in run.steps} for run in (first, other))
    common = [step for step in theirs if step in ours]
    for step in common:
        if theirs[step] != ours[step]:
            return f"different from step {step} on: {theirs[step]!r} beside {ours[step]!r}"
    return f"bitwise equal in all {len(common)} common steps"


# Any, here and below: JSON.
def _settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a config.json as names and texts, without its inner names and empty values."""
    found: dict[str, str] = {}
    for name, value in config.items():
        inner = value if isinstance(value, dict) else {"": value}
        words = "version of " if name == "versions" else ""
        known = {key: each for key, each in inner.items() if each not in (None, [], {})}
        for key, each in known.items():
            text = each if isinstance(each, str) else json.dumps(each)
            found[f"{words}{key or name}"] = text[:_LONGEST]
    return found


def _in_words(event: Record) -> dict[str, str]:
    step, dump = f"{event['step']:,}", str(event.get("dump") or "")
    if event["kind"] == "ranks":
        news = [f"rank {rank} was lost" for rank in event["lost"]]
        news += [f"rank {rank} joined" for rank in event["came"]]
        recovery = f"ranks {', '.join(map(str, event['ranks']))} train"
        return {"step": step, "happened": ", ".join(news), "recovery": recovery, "dump": dump}
    held = event["microbatch"]
    computing = "" if held is None else f" during microbatch {held}"
    happened = f"worker {event['worker']} (process {event['pid']}) {event['reason']}{computing}"
    later = f"{1e3 * event['seconds']:.0f} ms later"
    recovery = f"the step was completed {later}; the worker was replaced"
    return {"step": step, "happened": happened, "recovery": recovery, "dump": dump}


# -- charts ----------------------------------------------------------


def _draw_charts(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a chart for each title, as SVG.

    The lines of the first run are the widest, and are seen behind equal ones of later runs.
    """
    # Late, because it takes half a second.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    means = dict.fromkeys(name for run in runs for name in run.names_of_means() if name != "loss")
    titles = ["loss", *means, "learning rate", "samples per second"]
    if any(np.isfinite(run.numbers("grad_norm")).any() for run in runs):
        titles.append("norm of the gradients")
    with rc_context(_STYLE):
        figures = [Figure(figsize=_INCHES, layout="constrained") for _ in titles]
        axes = {title: figure.subplots() for title, figure in zip(titles, figures, strict=True)}
        for title, each in axes.items():
            each.set_title(title, parse_math=False)
            each.set_xlabel("step")
        for number, run in enumerate(runs):
            width = 1.2 + 2.8 * (len(runs) - 1 - number) / max(1, len(runs) - 1)
            _draw_run(run, _COLOURS[number % len(_COLOURS)], width, axes)
        low, high = axes["loss"].dataLim.intervaly
        if low > 0 and high > _LOG_RATIO * low:
            axes["loss"].set_yscale("log")
        return [_svg_of(figure) for figure in figures]


def _svg_of(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "<svg" + text.getvalue().partition("<svg")[2]


def _draw_run(run: RecordedRun, colour: str, width: float, axes: dict[str, Axes]) -> None:
    steps, ends = run.numbers("step"), _numbers(epoch.get("steps") for epoch in run.epochs)
    stride = math.ceil(len(steps) / _MOST_POINTS)

    def draw(title: str, values: Floats) -> None:
        axes[title].plot(steps[::stride], values[::stride], color=colour, linewidth=width)

    draw("loss", run.numbers("loss"))
    for name in run.names_of_means():
        if name != "loss":
            axes[name].plot(ends, run.means("train", name), color=colour, linewidth=width)
        axes[name].plot(ends, run.means("validation", name), "o", color=colour, ms=3 + width)
    rates = [step.get("learning_rates") or [None] for step in run.steps]
    for group in range(max(map(len, rates))):
        draw("learning rate", _numbers((each[group : group + 1] or [None])[0] for each in rates))
    if "norm of the gradients" in axes:
        draw("norm of the gradients", run.numbers("grad_norm"))
    with np.errstate(invalid="ignore", divide="ignore"):
        draw("samples per second", run.numbers("samples") / run.numbers("seconds"))
    for event in run.events:
        axes["loss"].axvline(event["step"], color="#d1242f", linewidth=0.8)
