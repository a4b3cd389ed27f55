"""The picture of a training: loss, accuracy, and what each replica did in the last steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phalanx.callbacks.events import Span, StepDone
from phalanx.files import written_whole

__all__ = ["draw_training"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from phalanx.callbacks.history import EpochMeans, History

_INK = "#1f2933"
_QUIET = "#8a94a3"
_GRID = "#e4e8ee"
_TRAIN = "#2563a8"
_TRAIN_LIGHT = "#b5cdea"
_VALIDATION = "#e07a1f"
_MERGING = "#3d4653"
# One colour per microbatch; the eleventh has the first one's again.
_MICROBATCHES = (
    "#5b9bd5", "#70b77e", "#f2b950", "#e8836b", "#a58bd0",
    "#5fc1c4", "#d98cb3", "#b7a275", "#8fb3e0", "#a3cf7a",
)  # fmt: skip
# Any: matplotlib lists the type of each of its hundreds of settings.
_STYLE: Any = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}
_DPI = 140
_MAX_STEPS = 6  # of the timeline
_MAX_BARS_WITH_NUMBERS = 400
_MAX_LEGEND_ENTRIES = 10
_MAX_EPOCH_LINES = 40
# Beyond this ratio of the largest to the smallest loss a linear axis shows only the beginning.
_LOG_RATIO = 20.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of consecutive steps, in milliseconds since the first of them began.

    Args:
        spans: ``(replica, microbatch or None, start_ms, length_ms)``.
        step_starts: ``(step, start_ms)`` of each step.
        num_replicas: Rows.
        busy: For each replica, the fraction of the steps' time in which it worked.
    """

    spans: tuple[tuple[int, int | None, float, float], ...]
    step_starts: tuple[tuple[int, float], ...]
    num_replicas: int
    busy: tuple[float, ...]


def lay_out_timeline(steps: Iterable[StepDone]) -> Timeline:
    """Choose the last steps that belong together and put their spans on one axis.

    Only steps that follow each other directly belong together: between two of them that do not,
    something else was done, such as a test, and the gap would be most of the picture.
    """
    chosen = _last_neighbours([step for step in steps if step.spans])
    if not chosen:
        return Timeline(spans=(), step_starts=(), num_replicas=0, busy=())
    origin_s = min(span.start_s for span in chosen[0].spans)
    seconds = sum(step.seconds for step in chosen)
    num_replicas = len(chosen[-1].busy_s)
    return Timeline(
        spans=tuple(_in_ms(span, origin_s) for step in chosen for span in step.spans),
        step_starts=tuple(
            (step.step, 1e3 * (min(span.start_s for span in step.spans) - origin_s))
            for step in chosen
        ),
        num_replicas=num_replicas,
        busy=tuple(
            min(1.0, sum(step.busy_s[replica] for step in chosen) / seconds) if seconds else 0.0
            for replica in range(num_replicas)
        ),
    )


def _last_neighbours(steps: Sequence[StepDone]) -> Sequence[StepDone]:
    chosen = list(steps[-1:])
    for earlier in reversed(steps[:-1]):
        if len(chosen) == _MAX_STEPS or earlier.epoch != chosen[0].epoch:
            break
        chosen.insert(0, earlier)
    return chosen


def _in_ms(span: Span, origin_s: float) -> tuple[int, int | None, float, float]:
    start_ms, length_ms = 1e3 * (span.start_s - origin_s), 1e3 * (span.stop_s - span.start_s)
    return span.replica, span.microbatch, start_ms, length_ms


def draw_training(history: History, *, title: str, path: Path | None = None) -> Figure:
    """Draw a run.

    Args:
        history: Of the run; its last steps' spans make the timeline.
        title: The line above all.
        path: A PNG file to be written, or replaced; its folder must exist.
    """
    # Here and not above: it takes a second to import, which `--help` and errors need not wait for.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Agg by hand: a backend chosen through pyplot would be the caller's, and may want a screen.
    with mpl.rc_context(_STYLE):
        timeline = lay_out_timeline(history.last_steps)
        figure = Figure(figsize=(11, 6.2 + 0.28 * timeline.num_replicas), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.008, ha="left", fontsize=13, fontweight="bold")
        _draw_panels(figure, history, timeline)
        if path is not None:
            with written_whole(path) as draft:
                figure.savefig(draft, dpi=_DPI, format="png")
    return figure


def smooth(values: Sequence[float]) -> Floats:
    """Average each value with its neighbours, a fortieth of the curve on either side.

    At the ends the average is over the neighbours that are there; values that are not finite are
    left out.

    Example:
        >>> smooth([3.0, 1.0]).tolist()
        [3.0, 1.0]
    """
    array = np.asarray(values, dtype=np.float64)
    reach = len(array) // 40
    finite = np.isfinite(array)
    sums = np.concatenate(([0.0], np.where(finite, array, 0.0).cumsum()))
    counts = np.concatenate(([0], finite.cumsum()))
    index = np.arange(len(array))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(array))
    with np.errstate(invalid="ignore"):
        means: Floats = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return means


def _draw_panels(figure: Figure, history: History, timeline: Timeline) -> None:
    has_accuracy = any("accuracy" in epoch.train for epoch in history.epochs)
    grid = figure.add_gridspec(2, 2, height_ratios=[1.5, 0.45 + 0.14 * timeline.num_replicas])
    if has_accuracy:
        _draw_loss(figure.add_subplot(grid[0, 0]), history.losses, history.epochs)
        _draw_accuracy(figure.add_subplot(grid[0, 1]), history.epochs)
    else:
        _draw_loss(figure.add_subplot(grid[0, :]), history.losses, history.epochs)
    _draw_timeline(figure.add_subplot(grid[1, :]), timeline)


def _draw_loss(axes: Axes, losses: Sequence[float], epochs: Sequence[EpochMeans]) -> None:
    axes.set(title="Loss", xlabel="step")
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color=_TRAIN_LIGHT, linewidth=0.8, label="each step")
    axes.plot(steps, smooth(losses), color=_TRAIN, linewidth=1.8, label="smoothed")
    tested = [epoch for epoch in epochs if epoch.validation and "loss" in epoch.validation]
    if tested:
        axes.plot(
            [epoch.last_step for epoch in tested],
            [epoch.validation["loss"] for epoch in tested if epoch.validation],
            color=_VALIDATION, linewidth=1.4, marker="o", markersize=4.5, label="validation",
        )  # fmt: skip
    if len(epochs) <= _MAX_EPOCH_LINES:
        for epoch in epochs:
            axes.axvline(epoch.last_step, color=_GRID, linewidth=0.9, zorder=0)
    axes.grid(visible=False, axis="x")
    finite = smooth(losses)[np.isfinite(smooth(losses))]
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > _LOG_RATIO:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.01)
    axes.legend(loc="upper right")


def _draw_accuracy(axes: Axes, epochs: Sequence[EpochMeans]) -> None:
    axes.set(title="Accuracy", xlabel="epoch")
    train = {epoch.epoch: epoch.train for epoch in epochs}
    validation = {epoch.epoch: epoch.validation for epoch in epochs if epoch.validation}
    for label, colour, means_by_epoch in (
        ("train", _TRAIN, train),
        ("validation", _VALIDATION, validation),
    ):
        percents = {
            epoch: 100 * means["accuracy"]
            for epoch, means in means_by_epoch.items()
            if "accuracy" in means
        }
        if percents:
            last = list(percents.values())[-1]
            axes.plot(list(percents), list(percents.values()), color=colour, linewidth=1.6,
                      marker="o", markersize=4.5,
                      label=f"{label}, {last:.1f} % in the end")  # fmt: skip
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="lower right")


def _draw_timeline(axes: Axes, timeline: Timeline) -> None:
    # The gap below the title is for the steps' numbers, the space beside it for the legend.
    axes.set_title("What each replica did in the last steps", pad=20)
    axes.set_xlabel("milliseconds")
    if not timeline.spans:
        axes.text(0.5, 0.5, "no steps in this process", transform=axes.transAxes, ha="center")
        axes.set_yticks([])
        return
    for microbatch in sorted({span[1] for span in timeline.spans}, key=_merging_last):
        _draw_bars(axes, timeline, microbatch)
    if len(timeline.spans) <= _MAX_BARS_WITH_NUMBERS:
        _number_bars(axes, timeline)
    _mark_steps(axes, timeline)
    _name_rows(axes, timeline)
    _explain_colours(axes)


def _mark_steps(axes: Axes, timeline: Timeline) -> None:
    for step, start_ms in timeline.step_starts:
        axes.axvline(start_ms, color=_QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(f"step {step}", (start_ms, 1.0), xycoords=("data", "axes fraction"),
                      xytext=(3, 2), textcoords="offset points", color=_QUIET,
                      fontsize=8.5, va="bottom")  # fmt: skip


def _name_rows(axes: Axes, timeline: Timeline) -> None:
    rows = range(timeline.num_replicas)
    axes.set_yticks(rows, [f"replica {row}\n{timeline.busy[row]:.0%} busy" for row in rows])
    axes.set_ylim(timeline.num_replicas - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.005)


def _explain_colours(axes: Axes) -> None:
    # Here and not above, like all of matplotlib.
    from matplotlib.transforms import ScaledTranslation

    one_line_up = ScaledTranslation(0, 16 / 72, axes.figure.dpi_scale_trans)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0,
                bbox_transform=axes.transAxes + one_line_up, fontsize=8.5, handlelength=0.9,
                handletextpad=0.4, columnspacing=1.0, ncols=_MAX_LEGEND_ENTRIES + 1)  # fmt: skip


def _draw_bars(axes: Axes, timeline: Timeline, microbatch: int | None) -> None:
    spans = [span for span in timeline.spans if span[1] == microbatch]
    is_listed = microbatch is None or microbatch < _MAX_LEGEND_ENTRIES
    axes.barh(
        [replica for replica, _, _, _ in spans],
        [length_ms for _, _, _, length_ms in spans],
        left=[start_ms for _, _, start_ms, _ in spans],
        height=0.62 if microbatch is not None else 0.36,
        color=_MERGING if microbatch is None else _MICROBATCHES[microbatch % len(_MICROBATCHES)],
        edgecolor="white", linewidth=0.5,
        label=_name_of(microbatch) if is_listed else None,
    )  # fmt: skip


def _name_of(microbatch: int | None) -> str:
    if microbatch is None:
        return "merging and optimizer"
    return "microbatch 0" if microbatch == 0 else str(microbatch)


def _number_bars(axes: Axes, timeline: Timeline) -> None:
    end_ms = max(start_ms + length_ms for _, _, start_ms, length_ms in timeline.spans)
    for replica, microbatch, start_ms, length_ms in timeline.spans:
        if microbatch is not None and length_ms > 0.012 * end_ms:
            axes.text(start_ms + length_ms / 2, replica, str(microbatch), color="white",
                      fontsize=8, ha="center", va="center_baseline")  # fmt: skip


def _merging_last(microbatch: int | None) -> tuple[bool, int]:
    return (microbatch is None, microbatch or 0)
