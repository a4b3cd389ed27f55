"""The page: what stands on it, in which order, and what keeps it from reaching outside.

Everything from a run goes in as text of an element or an attribute, which ElementTree escapes. A
policy on the page itself allows our own script and styles by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import numpy as np

from phalanx import __version__
from phalanx.callbacks import Record
from phalanx.cli.reporting.charts import Curve, Strip, add, draw_curves, draw_strip
from phalanx.cli.reporting.comparison import compare_losses, compare_settings, final_values
from phalanx.cli.reporting.curves import Axis, Thinned, span_of, thin
from phalanx.cli.reporting.runs import Floats, RecordedRun, number_of

__all__ = ["MARK", "make_page"]

MARK = "<!doctype html>\n<!-- phalanx report -->\n"
"""What a report begins with."""

_ASSETS = Path(__file__).parents[1] / "assets"
_LOSS = "loss"
_MOST_COLUMNS = 200


def make_page(runs: Sequence[RecordedRun]) -> str:
    """Return the page about ``runs``, one at least."""
    html = Element("html", {"lang": "en"})
    names = ", ".join(run.name for run in runs)
    _add_head(html, f"{names} – phalanx report")
    body = add(html, "body")
    add(body, "h1", names if len(runs) == 1 else f"{len(runs)} runs")
    _add_legend(body, runs)
    _add_outcome(body, runs)
    steps = span_of([run.numbers("step") for run in runs])
    _add_curves(body, runs, steps)
    _add_replicas(body, runs, steps)
    _add_failures(body, runs)
    _add_settings(body, runs)
    add(body, "footer", f"phalanx {__version__}. Steps are along each chart; point at one.")
    add(body, "script", _asset("report.js"))
    return MARK + tostring(html, encoding="unicode", method="html") + "\n"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _add_head(html: Element, title: str) -> None:
    head = add(html, "head")
    add(head, "meta", charset="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_digest('report.js')}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    add(head, "meta", **{"http-equiv": "Content-Security-Policy", "content": policy})
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "meta", name="color-scheme", content="light dark")
    add(head, "title", title)
    add(head, "style", _asset("report.css"))


def _digest(name: str) -> str:
    digest = hashlib.sha256(_asset(name).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _add_legend(body: Element, runs: Sequence[RecordedRun]) -> None:
    if len(runs) == 1:
        return
    legend = add(body, "ul", class_="legend")
    for number, run in enumerate(runs):
        add(legend, "li", run.name, class_=f"c{number % 8}")


def _add_outcome(body: Element, runs: Sequence[RecordedRun]) -> None:
    add(body, "h2", "What came of it")
    found = [final_values(run) for run in runs]
    names = dict.fromkeys(name for values in found for name in values)
    rows = {name: [values.get(name, "–") for values in found] for name in names}
    if len(runs) > 1:
        beside = [compare_losses(runs[0], run) for run in runs[1:]]
        rows[f"losses beside {runs[0].name}"] = ["–", *beside]
    _add_table(body, runs, rows)


def _add_table(
    parent: Element, runs: Sequence[RecordedRun], rows: Mapping[str, Sequence[str]]
) -> None:
    table = add(add(parent, "div", class_="wide"), "table")
    if len(runs) > 1:
        heads = add(table, "tr")
        add(heads, "th")
        for number, run in enumerate(runs):
            add(heads, "th", run.name, class_=f"run c{number % 8}")
    for name, values in rows.items():
        row = add(table, "tr")
        add(row, "th", name)
        for value in values:
            add(row, "td", value)


def _add_curves(body: Element, runs: Sequence[RecordedRun], steps: Axis) -> None:
    add(body, "h2", "Curves")
    charts = add(body, "div", class_="charts")
    names = dict.fromkeys(name for run in runs for name in run.names_of_means() if name != _LOSS)
    curves = [_loss_of(run, number) for number, run in enumerate(runs)]
    validation = [_means_of(run, number, "validation", _LOSS) for number, run in enumerate(runs)]
    note = "lines: each step; dots: validation" if _is_any(validation) else ""
    draw_curves(charts, "Loss", [*curves, *validation], steps, note=note, may_be_log=True)
    for name in names:
        train, validation = (
            [_means_of(run, number, kind, name) for number, run in enumerate(runs)]
            for kind in ("train", "validation")
        )
        draw_curves(
            charts,
            name.capitalize(),
            [*train, *validation],
            steps,
            note="dashes: training; dots: validation" if _is_any(validation) else "",
            is_percent=name == "accuracy",
        )
    rates = [curve for number, run in enumerate(runs) for curve in _rates_of(run, number)]
    draw_curves(charts, "Learning rate", rates, steps)
    norms = [_norm_of(run, number) for number, run in enumerate(runs)]
    draw_curves(charts, "Norm of the gradients", norms, steps, may_be_log=True)
    speeds = [curve for number, run in enumerate(runs) for curve in _speeds_of(run, number)]
    note = "thin lines: within steps; dots: whole epochs"
    draw_curves(charts, "Samples per second", speeds, steps, note=note, from_zero=True)


def _is_any(curves: Sequence[Curve]) -> bool:
    return any(np.isfinite(curve.points.mean).any() for curve in curves)


def _loss_of(run: RecordedRun, number: int) -> Curve:
    points = thin(run.numbers("step"), run.numbers(_LOSS))
    return Curve(name=run.name, colour=number, points=points)


def _norm_of(run: RecordedRun, number: int) -> Curve:
    points = thin(run.numbers("step"), run.numbers("grad_norm"))
    return Curve(name=run.name, colour=number, points=points)


def _means_of(run: RecordedRun, number: int, kind: str, name: str) -> Curve:
    points = _as_they_are(run.numbers_of_epochs("last_step"), run.means(kind, name))
    is_line = kind == "train"
    return Curve(
        name=f"{run.name}, {kind}",
        colour=number,
        points=points,
        kind="dashes" if is_line and len(points.x) > 1 else "dots",
    )


def _as_they_are(x: Floats, y: Floats) -> Thinned:
    return thin(x, y) if len(x) else Thinned(x, y, y, y)


def _rates_of(run: RecordedRun, number: int) -> list[Curve]:
    """Return a curve for each group of parameters whose rate is not that of the first."""
    rates = run.lists("learning_rates")
    num_groups = max(map(len, rates))
    curves: list[Curve] = []
    first: Floats | None = None
    for group in range(num_groups):
        own = np.array([each[group] if group < len(each) else np.nan for each in rates])
        if first is not None and np.array_equal(own, first, equal_nan=True):
            continue
        curves.append(
            Curve(
                name=run.name if group == 0 else f"{run.name}, group {group}",
                colour=number,
                points=thin(run.numbers("step"), own),
                kind="line" if group == 0 else "dashes",
            )
        )
        first = own if first is None else first
    return curves


def _speeds_of(run: RecordedRun, number: int) -> list[Curve]:
    """Return the speed within steps, and that of whole epochs, with what lies between steps."""
    seconds = run.numbers("seconds")
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = run.numbers("samples") / seconds
        whole = run.numbers_of_epochs("samples") / run.numbers_of_epochs("seconds")
    in_epochs = _as_they_are(run.numbers_of_epochs("last_step"), whole)
    points = thin(run.numbers("step"), speed, seconds)
    return [
        Curve(name=f"{run.name}, in steps", colour=number, points=points, kind="thin"),
        Curve(name=f"{run.name}, whole epochs", colour=number, points=in_epochs, kind="dots"),
    ]


def _add_replicas(body: Element, runs: Sequence[RecordedRun], steps: Axis) -> None:
    strips = {run.name: strip for run in runs if (strip := strip_of(run)) is not None}
    if not strips:
        return
    add(body, "h2", "What replicas did")
    text = (
        "The stronger the colour, the larger the part of the time of steps in which a replica "
        "worked. A red line: there a worker was lost."
    )
    add(body, "p", text)
    for name, strip in strips.items():
        draw_strip(body, name, strip, steps)


def strip_of(run: RecordedRun) -> Strip | None:
    """Return what the replicas of a run did, in few columns; None where that is not known."""
    busy, seconds = run.lists("busy_s"), run.numbers("seconds")
    num_replicas = max(map(len, busy))
    if not num_replicas:
        return None
    count = len(busy)
    starts = np.unique(np.linspace(0, count, min(count, _MOST_COLUMNS), endpoint=False).astype(int))
    parts = np.full((num_replicas, count), np.nan)
    for step, each in enumerate(busy):
        parts[: len(each), step] = each
    there = np.isfinite(parts) & np.isfinite(seconds)
    worked = np.add.reduceat(np.where(there, parts, 0.0), starts, axis=1)
    lasted = np.add.reduceat(np.where(there, seconds, 0.0), starts, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = worked / lasted
    numbers = run.numbers("step")
    ends = numbers[np.append(starts[1:], count) - 1]
    marks = [
        (failure["worker"], int(np.searchsorted(ends, failure["step"])), _loss_in_words(failure))
        for failure in run.failures
        if failure.get("worker") in range(num_replicas) and failure["step"] <= ends[-1]
    ]
    return Strip(steps=ends, busy=shares, marks=marks)


def _loss_in_words(failure: Record) -> str:
    return f"step {failure['step']}: worker {failure['worker']} {failure.get('reason')}"


def _add_failures(body: Element, runs: Sequence[RecordedRun]) -> None:
    add(body, "h2", "Failures and recoveries")
    if not any(run.failures or run.changes for run in runs):
        add(body, "p", "No worker was lost.")
        return
    table = add(add(body, "div", class_="wide"), "table", class_="events")
    heads = add(table, "tr")
    for head in ("run", "step", "what happened", "and then"):
        add(heads, "th", head)
    for number, run in enumerate(runs):
        for event in sorted([*run.failures, *run.changes], key=lambda each: each["step"]):
            row = add(table, "tr")
            add(row, "td", run.name, class_=f"run c{number % 8}")
            add(row, "td", f"{event['step']:,}")
            happened, then = _failure_in_words(event)
            cell = add(row, "td", happened)
            if event.get("dump"):
                dump = add(cell, "details")
                add(dump, "summary", "where its threads stood")
                add(dump, "pre", str(event["dump"]))
            add(row, "td", then)


def _failure_in_words(event: Record) -> tuple[str, str]:
    if event["kind"] == "ranks":
        lost, came, now = (_texts_of(event.get(name)) for name in ("lost", "came", "ranks"))
        news = [f"rank {rank} was lost" for rank in lost] + [f"rank {rank} came" for rank in came]
        return ", ".join(news), f"the ranks {', '.join(now)} train"
    held = event.get("microbatch")
    in_hands = "" if held is None else f" with microbatch {held} in hands"
    seconds = number_of(event.get("seconds"))
    later = f" {1e3 * seconds:.0f} ms later" if math.isfinite(seconds) else ""
    happened = f"worker {event.get('worker')} (process {event.get('pid')}) {event.get('reason')}"
    return f"{happened}{in_hands}", f"the step was completed{later}; another worker was started"


def _texts_of(value: Any) -> list[str]:  # Any: JSON
    return [str(each) for each in value] if isinstance(value, list) else []


def _add_settings(body: Element, runs: Sequence[RecordedRun]) -> None:
    if not any(run.config for run in runs):
        return
    add(body, "h2", "Settings")
    differing, common = compare_settings(runs)
    if len(runs) > 1:
        add(body, "h3", "that differ")
        if differing:
            _add_table(body, runs, differing)
        else:
            add(body, "p", "None.")
        add(body, "h3", "that all have")
    table = add(add(body, "div", class_="wide"), "table")
    for name, values in common.items():
        row = add(table, "tr")
        add(row, "th", name)
        add(row, "td", values[0])
