"""The figures of the benchmarks: panels of bars and of lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_OURS, _PEER, _GUIDE, _GREY, _INK = "#0f766e", "#9aa3ad", "#c2410c", "#6b7280", "#1f2933"
_PARTS = (_OURS, "#5eaaa3", "#c9ced4", "#eceef1")
_LINES_OF_OURS = (_OURS, "#4f46e5", "#5eaaa3", "#a16207")
_LINES_OF_PEERS = (_PEER, "#b45309", "#7c3aed")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar; of several ``parts``, one behind the other. ``dots`` are drawn upon it."""

    label: str
    parts: tuple[float, ...]
    text: str = ""
    ours: bool = False
    dots: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars, and vertical lines across them at ``guides``."""

    title: str
    note: str
    bars: tuple[Bar, ...]
    parts: tuple[str, ...] = ()
    guides: Mapping[str, float] = field(default_factory=dict)
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points of a line, as x and y."""

    label: str
    points: tuple[tuple[float, float], ...]
    ours: bool = False
    dotted: bool = False


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines over x, and horizontal ones at ``levels``."""

    title: str
    note: str
    lines: tuple[Line, ...]
    levels: Mapping[str, float] = field(default_factory=dict)
    ticks: Mapping[float, str] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False


Panel = Bars | Lines


def draw(panels: Sequence[Panel], title: str, footnote: str, path: Path) -> None:
    """Draw the panels, two in a row, into a PNG file."""
    # Slow: half a second that no contestant's process should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = min(2, max(1, len(panels)))
    num_rows = max(1, -(-len(panels) // num_columns))
    tallest = max((len(each.bars) for each in panels if isinstance(each, Bars)), default=0)
    height = 1.0 + num_rows * max(3.5, 0.9 + 0.3 * tallest)
    figure = Figure(figsize=(7.4 * num_columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        if isinstance(panel, Bars):
            _draw_bars(axis, panel)
        else:
            _draw_lines(axis, panel)
        axis.set_title(panel.title, loc="left", weight="bold", color=_INK)
        axis.set_title(panel.note, loc="right", fontsize=8.5, color=_GREY)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=15, weight="bold", color=_INK)
    figure.supxlabel(textwrap.fill(footnote, 95 * num_columns), fontsize=8.5, color=_GREY)
    figure.savefig(path, dpi=130)


def _draw_bars(axis: Axes, panel: Bars) -> None:
    longest = max((max(sum(bar.parts), *bar.dots, 0.0) for bar in panel.bars), default=1.0)
    rows = list(reversed(panel.bars))  # barh counts from below
    for height, bar in enumerate(rows):
        left = 0.0
        for part, width in enumerate(bar.parts):
            colour = _PARTS[part] if panel.parts else _OURS if bar.ours else _PEER
            label = panel.parts[part] if panel.parts and height == 0 else None
            axis.barh(height, width, left=left, height=0.68, color=colour, label=label)
            left += width
        spread = [height + 0.5 * ((i + 0.5) / len(bar.dots) - 0.5) for i in range(len(bar.dots))]
        axis.plot(bar.dots, spread, "o", color=_INK, markersize=4, alpha=0.6)
        axis.annotate(
            bar.text,
            (max(left, *bar.dots, 0.0), height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            weight="bold" if bar.ours else "normal",
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over the guides
        )
    for words, at in panel.guides.items():
        axis.axvline(at, color=_GUIDE, linewidth=1.1, linestyle="--")
        axis.annotate(words, (at, 0.99), xycoords=("data", "axes fraction"), rotation=90, va="top",
                      fontsize=8, color=_GUIDE)  # fmt: skip
    axis.set_yticks(range(len(rows)), [bar.label for bar in rows], fontsize=9)
    if panel.log:
        axis.set_xscale("log")
    axis.set_xlim(1.0 if panel.log else 0.0, longest * (30 if panel.log else 1.3) or 1.0)
    axis.tick_params(axis="y", length=0)
    axis.xaxis.grid(True, color="#e5e7eb")
    if panel.parts and rows:
        axis.legend(fontsize=8.5, loc="lower right")


def _draw_lines(axis: Axes, panel: Lines) -> None:
    ours, peers = cycle(_LINES_OF_OURS), cycle(_LINES_OF_PEERS)
    for line in panel.lines:
        axis.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            color=next(ours if line.ours else peers),
            linestyle=":" if line.dotted else "-",
            linewidth=2,
            marker="o",
            markersize=3,
            label=line.label,
        )
    for words, level in panel.levels.items():
        axis.axhline(level, color=_PEER, linewidth=1, linestyle="--", zorder=0)
        axis.annotate(words, (0.99, level), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", fontsize=8.5, color=_GREY)  # fmt: skip
    if panel.log_x:
        axis.set_xscale("log", base=2)
    if panel.log_y:
        axis.set_yscale("log")
    if panel.ticks:
        axis.set_xticks(list(panel.ticks), list(panel.ticks.values()), rotation=30, fontsize=8.5)
        axis.minorticks_off()
    axis.grid(True, color="#e5e7eb")
    if panel.lines:
        axis.legend(frameon=False, fontsize=9)
