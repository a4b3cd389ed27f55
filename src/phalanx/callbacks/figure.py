"""The picture of a training: loss and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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
_MAX_EPOCH_LINES = 40
# Beyond this ratio of the largest to the smallest loss a linear axis shows only the beginning.
_LOG_RATIO = 20.0

Floats = npt.NDArray[np.float64]


def draw_training(history: History, *, title: str, path: Path | None = None) -> Figure:
    """Draw a run.

    Args:
        history: Of the run.
        title: The line above all.
        path: A PNG file to be written, or replaced; its folder must exist.
    """
    # Here and not above: it takes a second to import, which `--help` and errors need not wait for.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Agg by hand: a backend chosen through pyplot would be the caller's, and may want a screen.
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.008, ha="left", fontsize=13, fontweight="bold")
        _draw_panels(figure, history)
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


def _draw_panels(figure: Figure, history: History) -> None:
    has_accuracy = any("accuracy" in epoch.train for epoch in history.epochs)
    loss, *others = figure.subplots(1, 1 + has_accuracy, squeeze=False)[0]
    _draw_loss(loss, history.losses, history.epochs)
    for accuracy in others:
        _draw_accuracy(accuracy, history.epochs)


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
