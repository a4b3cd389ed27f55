"""Charts as elements of a page: lines in SVG that fill any width, with labels of HTML around them.

figure.chart
├─ figcaption            title, what the lines are
└─ div.plot              data-points: what `report.js` shows of the place that is pointed at
   ├─ div.y  div.x       ticks, placed in per cent
   └─ svg                1000 units wide and high, stretched to the plot; strokes keep their width
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from phalanx.cli.reporting.curves import Axis, Thinned, format_tick
from phalanx.cli.reporting.runs import Floats

__all__ = ["Curve", "Strip", "add", "draw_curves", "draw_strip"]

_SIZE = 1000.0
_NUM_COLOURS = 8  # --c0 … --c7 in report.css
_NUM_SHADES = 10
_MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: What it is, beside its value.
        colour: Number of its colour.
        points: Where it goes.
        kind: "line": of many steps, with a band from the lowest to the highest of those that were
            put together; "dots": of few values; "dashes" and "thin": beside another of its colour.
    """

    name: str
    colour: int
    points: Thinned
    kind: str = "line"


@dataclass(frozen=True, kw_only=True)
class Strip:
    """What replicas did over the steps of a run.

    Attributes:
        steps: Of each column, the last one.
        busy: Of each replica and column, the part of the time in which it worked; nan: not there.
        marks: Replica, column and text of what happened there.
    """

    steps: Floats
    busy: Floats
    marks: Sequence[tuple[int, int, str]]


def add(parent: Element, tag: str, text: str | None = None, /, **attributes: str) -> Element:
    """Add an element; `class_` and `data_points` stand for `class` and `data-points`."""
    words = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    element = SubElement(parent, tag, words)
    element.text = text
    return element


def draw_curves(
    parent: Element,
    title: str,
    curves: Sequence[Curve],
    steps: Axis,
    *,
    note: str = "",
    is_percent: bool = False,
    from_zero: bool = False,
    may_be_log: bool = False,
) -> None:
    """Draw a chart over steps; nothing where there is no value.

    Args:
        parent: Where it goes.
        title: Above it.
        curves: On it.
        steps: Along it.
        note: Beside the title.
        is_percent: Whether values are parts of 1.
        from_zero: Whether the axis begins at 0.
        may_be_log: Whether it is logarithmic where that shows more.
    """
    curves = [curve for curve in curves if np.isfinite(curve.points.mean).any()]
    if not curves:
        return
    means = np.concatenate([curve.points.mean for curve in curves])
    axis = Axis.over(means, from_zero=from_zero, may_be_log=may_be_log)
    figure = add(parent, "figure", class_="chart")
    caption = add(figure, "figcaption")
    add(caption, "b", title)
    notes = [note, "logarithmic" if axis.is_log else ""]
    add(caption, "small", "; ".join(each for each in notes if each))
    plot = _add_plot(figure, title, _points_of(curves, is_percent=is_percent), steps)
    svg = _add_axes(plot, steps, axis, is_percent=is_percent)
    for curve in curves:
        _add_curve(svg, curve, steps, axis)


def draw_strip(parent: Element, title: str, strip: Strip, steps: Axis) -> None:
    """Draw a row for each replica, the darker the busier, with marks of what happened."""
    busy = strip.busy[:_MOST_ROWS]
    figure = add(parent, "figure", class_="chart strip")
    caption = add(figure, "figcaption")
    add(caption, "b", title)
    if len(strip.busy) > len(busy):
        add(caption, "small", f"the first {len(busy)} of {len(strip.busy)} replicas")
    told: dict[str, object] = {
        "marks": [[*mark] for mark in strip.marks],
        "x": _rounded(strip.steps),
        "rows": [_rounded(row) for row in busy],
    }
    plot = _add_plot(figure, title, told, steps)
    plot.set("style", f"--rows: {len(busy)}")
    labels = add(plot, "div", class_="y")
    for row in range(len(busy)):
        top = f"top: {100 * (row + 0.5) / len(busy):.3f}%"
        add(labels, "span", f"replica {row}", style=top)
    _add_ticks(plot, steps)
    svg = _add_svg(plot, len(busy))
    columns = _columns(strip.steps, steps)
    for shade, path in sorted(_shaded(busy, columns).items()):
        opacity = 0.12 + 0.88 * shade / _NUM_SHADES
        add(svg, "path", d=path, class_="busy", style=f"opacity: {opacity:.2f}")
    for row, column, _ in strip.marks:
        if row < len(busy):
            left, right = columns[column]
            middle = f"{(left + right) / 2:.1f}"
            add(svg, "path", d=f"M{middle},{row} V{row + 1}", class_="mark")


def _points_of(curves: Sequence[Curve], *, is_percent: bool) -> dict[str, object]:
    return {
        "percent": is_percent,
        "curves": [
            {
                "name": curve.name,
                "colour": curve.colour % _NUM_COLOURS,
                "x": _rounded(curve.points.x),
                "y": _rounded(curve.points.mean),
            }
            for curve in curves
        ],
    }


def _rounded(values: Floats) -> list[float | None]:
    """Return values as JSON holds them, as exact as is read."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _add_plot(figure: Element, title: str, told: dict[str, object], steps: Axis) -> Element:
    points = json.dumps(told, separators=(",", ":"), allow_nan=False)
    return add(
        figure,
        "div",
        class_="plot",
        data_points=points,
        data_first=f"{steps.low:g}",
        data_last=f"{steps.high:g}",
        tabindex="0",
        role="img",
        aria_label=title,
    )


def _add_svg(plot: Element, height: float) -> Element:
    return add(
        add(plot, "div", class_="area"),
        "svg",
        viewBox=f"0 0 {_SIZE:g} {height:g}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _add_ticks(plot: Element, steps: Axis) -> list[float]:
    whole = [tick for tick in steps.ticks() if tick == int(tick)]
    places = steps.place(np.array(whole))
    labels = add(plot, "div", class_="x")
    for tick, place in zip(whole, places, strict=True):
        add(labels, "span", format_tick(tick), style=f"left: {100 * place:.3f}%")
    return [float(place) for place in places]


def _add_axes(plot: Element, steps: Axis, axis: Axis, *, is_percent: bool) -> Element:
    ticks = axis.ticks()
    labels = add(plot, "div", class_="y")
    heights = 1 - axis.place(np.array(ticks))
    for tick, height in zip(ticks, heights, strict=True):
        text = format_tick(tick, is_percent=is_percent)
        add(labels, "span", text, style=f"top: {100 * height:.3f}%")
    places = _add_ticks(plot, steps)
    svg = _add_svg(plot, _SIZE)
    lines = [f"M0,{_SIZE * height:.1f} H{_SIZE:g}" for height in heights]
    lines += [f"M{_SIZE * place:.1f},0 V{_SIZE:g}" for place in places]
    add(svg, "path", d=" ".join(lines), class_="grid")
    return svg


def _add_curve(svg: Element, curve: Curve, steps: Axis, axis: Axis) -> None:
    colour = f"c{curve.colour % _NUM_COLOURS}"
    x = _SIZE * steps.place(curve.points.x)
    y, low, high = (
        _SIZE * (1 - np.clip(axis.place(values), 0.0, 1.0))
        for values in (curve.points.mean, curve.points.low, curve.points.high)
    )
    if curve.kind == "dots":
        add(svg, "path", d=_line(x, y), class_=f"thin {colour}")
        dots = [f"M{a:.1f},{b:.1f} h0" for a, b in zip(x, y, strict=True) if math.isfinite(b)]
        add(svg, "path", d=" ".join(dots), class_=f"dots {colour}")
        return
    if curve.kind == "line" and np.nanmax(np.abs(low - high)) > 1:
        add(svg, "path", d=_band(x, low, high), class_=f"band {colour}")
    add(svg, "path", d=_line(x, y), class_=f"{curve.kind} {colour}")


def _line(x: Floats, y: Floats) -> str:
    """Return a path through all points, with gaps where a value is not finite."""
    parts, is_down = [], False
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(b):
            parts.append(f"{'L' if is_down else 'M'}{a:.1f},{b:.1f}")
        is_down = math.isfinite(b)
    return " ".join(parts)


def _band(x: Floats, low: Floats, high: Floats) -> str:
    there = np.isfinite(low) & np.isfinite(high)
    way = [*zip(x[there], high[there], strict=True)]
    way += reversed([*zip(x[there], low[there], strict=True)])
    return "M" + " L".join(f"{a:.1f},{b:.1f}" for a, b in way) + " Z"


def _columns(ends: Floats, steps: Axis) -> list[tuple[float, float]]:
    """Return where each column begins and ends; the first begins with the step it is of."""
    places = _SIZE * steps.place(ends)
    begins = np.append(_SIZE * steps.place(np.array([ends[0] - 1])), places[:-1])
    return [(max(0.0, float(begin)), float(end)) for begin, end in zip(begins, places, strict=True)]


def _shaded(busy: Floats, columns: Sequence[tuple[float, float]]) -> dict[int, str]:
    """Return a path of all cells of each shade: far less than an element for each cell."""
    paths: dict[int, list[str]] = {}
    for row, values in enumerate(busy.tolist()):
        for value, (left, right) in zip(values, columns, strict=True):
            if math.isfinite(value):
                shade = round(_NUM_SHADES * min(1.0, max(0.0, value)))
                cell = f"M{left:.1f},{row + 0.1:g} H{right:.1f} v.8 H{left:.1f} Z"
                paths.setdefault(shade, []).append(cell)
    return {shade: " ".join(cells) for shade, cells in paths.items()}
