"""What the killing came to: a table, JSON, and a figure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.machine import Machine
from benchmarks.record import headline, headlines

__all__ = [
    "SCHEMA",
    "TARGETS",
    "TITLES",
    "Disturbed",
    "Kill",
    "Target",
    "as_json",
    "draw_recovery",
    "percentile",
    "recovery_table",
]

SCHEMA = "phalanx.bench.recovery/1"
TITLES = {
    "processes": "worker processes",
    "torchrun": "torchrun, gloo",
    "launch": "phalanx launch",
}
_COLOURS = {"processes": "#0f766e", "torchrun": "#9aa3ad", "launch": "#c2703d"}
_MARK, _GREY, _INK = "#c2410c", "#6b7280", "#1f2933"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A percentile of the recovery is at most an ordinary step and ``extra_s``."""

    percent: int
    extra_s: float


TARGETS = (Target(percent=50, extra_s=0.1), Target(percent=99, extra_s=0.5))
_JUDGED = "processes"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What followed a kill, in seconds from it.

    Attributes:
        running_s: To the end of the step that was running; where that step was lost, to the end of
            the first one after the restart.
        noticed_s: To the end of the step in which the loss was noticed. It is a later step if the
            victim had done its part of the running one.
        whole_s: To the end of the first step that has all workers at work again.
    """

    running_s: float
    noticed_s: float
    whole_s: float


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """What was measured of one contestant.

    Attributes:
        name: Which.
        ordinary_s: Its ordinary steps.
        kills: Those after which it went on, at least one.
        num_asked: How many workers were to be killed.
        end: Why it did not go on after a further one.
    """

    name: str
    ordinary_s: tuple[float, ...]
    kills: tuple[Kill, ...]
    num_asked: int
    end: str = ""

    @property
    def median_s(self) -> float:
        """The ordinary step."""
        return statistics.median(self.ordinary_s)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least ``percent`` % of ``values`` do not exceed.

    Of fewer than 100 values the 99th percentile is the largest.

    Example:
        >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 99)
        (2.0, 4.0)
    """
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def _percentile(result: Disturbed, field: str, percent: int) -> float:
    return percentile([getattr(kill, field) for kill in result.kills], percent)


def _excess_s(result: Disturbed, target: Target) -> float:
    """Return by how much a percentile exceeds an ordinary step."""
    return _percentile(result, "running_s", target.percent) - result.median_s


def recovery_table(results: Sequence[Disturbed], model: str, workers: int) -> Table:
    """Return the table; a figure with a target is marked as met or missed."""
    table = Table(
        title=f"\n{model}, {workers} workers: ms from kill -9 to the end of the step",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(TITLES[result.name], justify="right", no_wrap=True)
    table.add_row("ordinary step, median", *(_ms(result.median_s) for result in results))
    table.add_row("went on after a kill", *map(_went_on, results))
    for target in TARGETS:
        cells = [_judged_cell(result, target) for result in results]
        table.add_row(f"step that was running, p{target.percent}", *cells, style="bold")
    for what, field in (("step that noticed it", "noticed_s"), ("all workers back", "whole_s")):
        for target in TARGETS:
            shown = [_ms(_percentile(result, field, target.percent)) for result in results]
            table.add_row(f"{what}, p{target.percent}", *shown)
    return table


def _went_on(result: Disturbed) -> str:
    return f"{len(result.kills)} of {result.num_asked}"


def _judged_cell(result: Disturbed, target: Target) -> Text:
    measured = _percentile(result, "running_s", target.percent)
    if result.name != _JUDGED:
        return Text(_ms(measured))
    met = _excess_s(result, target) <= target.extra_s
    bound = f"≤{_ms(result.median_s + target.extra_s)} {'✓' if met else '✗'}"
    return Text(f"{_ms(measured)} {bound}", style="green" if met else "red")


def as_json(
    results: Sequence[Disturbed],
    failures: Mapping[str, str],
    machine: Machine,
    **settings: Any,  # Any: JSON
) -> str:
    """Return everything that was measured, down to the single kill."""
    report = {
        "schema": SCHEMA,
        "machine": asdict(machine),
        **settings,
        "contestants": {result.name: _as_dict(result) for result in results},
        "failures": headlines(failures),
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


# Any: the values of JSON objects are of all kinds.
def _as_dict(result: Disturbed) -> Mapping[str, Any]:
    return {
        "title": TITLES[result.name],
        "ordinary_median_s": result.median_s,
        "num_asked": result.num_asked,
        "end": headline(result.end),
        "percentiles_s": {
            name: {
                f"p{target.percent}": _percentile(result, name, target.percent)
                for target in TARGETS
            }
            for name in ("running_s", "noticed_s", "whole_s")
        },
        "targets": [
            {
                **asdict(target),
                "measured_extra_s": _excess_s(result, target),
                "met": _excess_s(result, target) <= target.extra_s,
            }
            for target in TARGETS
            if result.name == _JUDGED
        ],
        "ordinary_s": result.ordinary_s,
        "kills": [asdict(kill) for kill in result.kills],
    }


def draw_recovery(
    results: Sequence[Disturbed], machine: Machine, path: Path, *, model: str, workers: int
) -> None:
    """Draw a dot for every kill on a logarithmic axis, into a PNG file."""
    # Slow: half a second that no contestant's process should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.9 + 1.1 * max(1, len(results))), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    rows = list(reversed(results))  # the axis counts from below
    for height, result in enumerate(rows):
        kills_ms = [1e3 * kill.running_s for kill in result.kills]
        spread = [
            height + 0.28 * (i / max(1, len(kills_ms) - 1) - 0.5) for i in range(len(kills_ms))
        ]
        axis.plot(kills_ms, spread, "o", color=_COLOURS[result.name], markersize=6, alpha=0.75)
        step_ms = 1e3 * result.median_s
        axis.plot([step_ms] * 2, [height - 0.32, height + 0.32], color=_INK, linewidth=2)
        for target in TARGETS if result.name == _JUDGED else ():
            bound_ms = 1e3 * (result.median_s + target.extra_s)
            axis.plot([bound_ms] * 2, [height - 0.32, height + 0.32], color=_MARK, linestyle="--")
            axis.annotate(
                f"p{target.percent} at most",
                (bound_ms, height + 0.34),
                ha="center",
                va="bottom",
                fontsize=8,
                color=_MARK,
            )
        p50, p99 = (1e3 * _percentile(result, "running_s", p) for p in (50, 99))
        axis.annotate(
            f"p50 {p50:.4g}, p99 {p99:.4g}; went on after {_went_on(result)}",
            (1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    axis.set_yticks(range(len(rows)), [TITLES[result.name] for result in rows], fontsize=10)
    axis.set_ylim(-0.6, max(1, len(rows)) - 0.3)
    axis.set_xscale("log")
    longest = max((kill.running_s for result in rows for kill in result.kills), default=1.0)
    axis.set_xlim(1.0, 1e3 * max(1.0, longest) * 30)
    axis.set_title(
        "ms from kill -9 to the end of the step; bar: an ordinary step",
        loc="right",
        fontsize=8.5,
        color=_GREY,
    )
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.xaxis.grid(True, color="#e5e7eb")
    axis.set_axisbelow(True)
    figure.suptitle("A worker is killed in mid-step", fontsize=15, weight="bold", color=_INK)
    commit = f" · commit {machine.commit}" if machine.commit else ""
    figure.supxlabel(
        f"{model}, {workers} workers · {machine.cpu}, {machine.cores} cores · torch "
        f"{machine.torch} · phalanx {machine.phalanx}{commit} · {machine.date}",
        fontsize=8.5,
        color=_GREY,
    )
    figure.savefig(path, dpi=130)


def _ms(seconds: float) -> str:
    """Return milliseconds with three or four significant digits."""
    ms = 1e3 * seconds
    return f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
