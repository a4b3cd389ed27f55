"""Show what came out: a table for the eye, JSON for the record, a figure for the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.arena import Outcome, Pace
from benchmarks.contestants import CONTESTANTS
from benchmarks.machine import Machine
from benchmarks.record import headlines
from benchmarks.standings import (
    BASELINES,
    Overhead,
    Standing,
    ideals,
    overheads,
    same_bits_costs,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "SCHEMA",
    "Result",
    "as_json",
    "curve_table",
    "draw",
    "main_rows",
    "model_table",
    "overhead_table",
    "title",
]

SCHEMA = "phalanx.bench.step/1"

_OURS, _OURS_EXACT, _PEER, _BY_HAND, _INK = "#0f766e", "#5eaaa3", "#9aa3ad", "#c9ced4", "#1f2933"
_IDEAL = "#c2410c"
_MODEL_STYLE = (("#0f766e", "o"), ("#c2410c", "s"), ("#4f46e5", "D"), ("#a16207", "^"))


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model's contest."""

    model: str
    workers: int
    outcome: Outcome
    standings: Sequence[Standing]


def title(name: str, workers: int) -> str:
    """Return what the reader calls a contestant."""
    return CONTESTANTS[name].title.format(workers=workers)


def main_rows(standings: Sequence[Standing]) -> list[Standing]:
    """Return the standings that are rows of the table; the rest are points of the curve.

    Without the fast mode there is no curve, and nothing is left out.
    """
    in_curve = {f"trainer-m{count}" for count in same_bits_costs(standings)} - {"trainer-m4"}
    return [standing for standing in standings if standing.name not in in_curve]


def model_table(result: Result) -> Table:
    """Return the table of one model; a ratio with a target is marked as met or missed."""
    table = Table(
        title=f"\n{result.model}: one training step in ms, and as a multiple of others",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,  # with its longest names it just fits into 80 columns
    )
    table.add_column("contestant", no_wrap=True)
    for heading in ("median", "min", "÷ DDP", f"÷ {result.workers} threads", "÷ Trainer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for standing in main_rows(result.standings):
        table.add_row(
            title(standing.name, result.workers),
            _ms(standing.median_s),
            _ms(standing.min_s),
            *(_ratio_cell(standing, baseline) for baseline in BASELINES),
            style="bold" if CONTESTANTS[standing.name].of_phalanx else "",
        )
    for name in result.outcome.failures:
        table.add_row(title(name, result.workers), Text("failed", style="red"))
    return table


def _ratio_cell(standing: Standing, baseline: str) -> Text:
    ratio = standing.ratio_by_baseline.get(baseline)
    if ratio is None:
        return Text("–")
    for verdict in standing.verdicts:
        if verdict.baseline == baseline:
            colour, mark = ("green", "✓") if verdict.met else ("red", "✗")
            return Text(f"{ratio:.2f} ≤{verdict.at_most:.2f} {mark}", style=colour)
    return Text(f"{ratio:.2f}")


def curve_table(results: Sequence[Result]) -> Table | None:
    """Return the cost of the same bits by number of microbatches; None if nobody measured it."""
    curves = {result.model: same_bits_costs(result.standings) for result in results}
    counts = sorted({count for curve in curves.values() for count in curve})
    if not counts:
        return None
    table = Table(
        title="\ncost of the same bits: ÷ Trainer",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("microbatches")
    for count in counts:
        table.add_column(f"{count:5}", justify="right")
    for model, curve in curves.items():
        table.add_row(model, *(f"{curve[n]:.2f}" if n in curve else "–" for n in counts))
    return table


def overhead_table(results: Sequence[Result]) -> Table | None:
    """Return what sharing the work costs beyond the ideal; None if nobody measured one.

    A column per model and ideal; a row per contestant of ours: its median over the ideal, and the
    milliseconds that it takes beyond.
    """
    columns = [
        (result.model, ideal, ideal_s, overheads(result.standings, result.workers)[ideal])
        for result in results
        for ideal, ideal_s in ideals(result.standings, result.workers).items()
    ]
    if not columns:
        return None
    workers = results[0].workers
    table = Table(
        title="\noverhead: multiple of the ideal, and ms beyond it",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("contestant", no_wrap=True)
    for model, ideal, _, _ in columns:
        heading = model + "\nchannels_last" * ideal.endswith("-cl")
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(
        f"ideal: 1 thread's time ÷ {workers}",
        *(f"{_ms(ideal_s)} ms" for _, _, ideal_s, _ in columns),
    )
    shown = {row.name for result in results for row in main_rows(result.standings)}
    for name, contestant in CONTESTANTS.items():
        if contestant.of_phalanx and name in shown:
            cells = [_overhead_cell(by_name.get(name)) for *_, by_name in columns]
            table.add_row(title(name, workers), *cells, style="bold")
    return table


def _overhead_cell(overhead: Overhead | None) -> str:
    if overhead is None:
        return "–"
    extra = 1e3 * overhead.extra_s
    return f"{overhead.ratio:.2f} {extra:+.{2 if abs(extra) < 10 else 1}f}"


def as_json(results: Sequence[Result], machine: Machine, pace: Pace) -> str:
    """Return everything that was measured, down to the single step."""
    report = {
        "schema": SCHEMA,
        "machine": asdict(machine),
        "pace": asdict(pace),
        "models": {result.model: _model_as_dict(result) for result in results},
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


# The values of JSON objects are of all kinds; hence `Any`.
def _model_as_dict(result: Result) -> Mapping[str, Any]:
    over_ideal = overheads(result.standings, result.workers)
    return {
        "workers": result.workers,
        "ideals_s": ideals(result.standings, result.workers),
        "contestants": {
            standing.name: {
                "title": title(standing.name, result.workers),
                "of_phalanx": CONTESTANTS[standing.name].of_phalanx,
                "num_steps": standing.num_steps,
                "median_s": standing.median_s,
                "min_s": standing.min_s,
                "ratio_by_baseline": dict(standing.ratio_by_baseline),
                "over_ideal": {
                    ideal: {"ratio": cost.ratio, "extra_s": cost.extra_s}
                    for ideal, by_name in over_ideal.items()
                    if (cost := by_name.get(standing.name))
                },
                "targets": [
                    {**asdict(verdict), "met": verdict.met} for verdict in standing.verdicts
                ],
                "seconds_by_round": result.outcome.seconds[standing.name],
            }
            for standing in result.standings
        },
        "failures": headlines(result.outcome.failures),
    }


def draw(results: Sequence[Result], machine: Machine, path: Path) -> None:
    """Draw a panel of bars per model, and the curve of what the same bits cost, into a PNG file."""
    # Slow: half a second that no contestant's process should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    has_curve = any(same_bits_costs(result.standings) for result in results)
    num_panels = len(results) + has_curve
    num_columns = 1 if num_panels == 1 else 2
    num_rows = -(-num_panels // num_columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(7.4 * num_columns, 0.9 + 3.5 * num_rows), layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axis, result in zip(axes, results, strict=False):
        _draw_bars(axis, result)
    if has_curve:
        _draw_curve(axes[len(results)], results)
    for axis in axes[num_panels:]:
        axis.set_axis_off()
    figure.suptitle(
        "One training step, Phalanx beside its peers", fontsize=15, weight="bold", color=_INK
    )
    commit = f" · commit {machine.commit}" if machine.commit else ""
    figure.supxlabel(
        f"{machine.cpu}, {machine.cores} cores · torch {machine.torch} · "
        f"phalanx {machine.phalanx}{commit} · {machine.date}",
        fontsize=8.5,
        color="#6b7280",
    )
    figure.savefig(path, dpi=130)


def _draw_bars(axis: Axes, result: Result) -> None:
    """Draw medians as bars, minima as ticks within them, and the ratio to the peer beside them."""
    rows = list(reversed(main_rows(result.standings)))  # barh counts from below
    medians = [1e3 * standing.median_s for standing in rows]
    axis.barh(range(len(rows)), medians, height=0.68, color=[_colour(row.name) for row in rows])
    for height, standing in enumerate(rows):
        fastest = 1e3 * standing.min_s
        axis.plot([fastest, fastest], [height - 0.34, height + 0.34], color="white", linewidth=1.4)
        ratio = standing.ratio_by_baseline.get("ddp")
        beside = "" if ratio is None or standing.name == "ddp" else f"  {ratio:.2f}×"
        ours = CONTESTANTS[standing.name].of_phalanx
        axis.annotate(
            f"{_ms(standing.median_s)}{beside}",
            (medians[height], height),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            weight="bold" if ours else "normal",
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over lines of ideals
        )
    labels = [title(standing.name, result.workers) for standing in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=9)
    for label, standing in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_color(_INK)
        label.set_fontweight("bold" if CONTESTANTS[standing.name].of_phalanx else "normal")
    legend = _draw_ideals(axis, result, num_rows=len(rows))
    axis.set_xlim(0, 1.3 * max(medians, default=1.0))
    axis.set_title(result.model, loc="left", weight="bold", color=_INK)
    axis.set_title(
        f"median ms, × DDP; white tick: fastest step{legend}",
        loc="right",
        fontsize=8.5,
        color="#6b7280",
    )
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.xaxis.grid(True, color="#e5e7eb")
    axis.set_axisbelow(True)


def _draw_ideals(axis: Axes, result: Result, *, num_rows: int) -> str:
    """Draw each ideal as a thin line across the bars, and return what to say of the lines."""
    legend = ""
    for ideal, ideal_s in ideals(result.standings, result.workers).items():
        by_hand = ideal.endswith("-cl")
        x, y = [1e3 * ideal_s] * 2, [-0.5, num_rows - 0.5]
        axis.plot(x, y, color=_IDEAL, linewidth=1.1, linestyle=":" if by_hand else "--")
        legend += "; dotted: channels_last" if by_hand else "; dashed: ideal"
    return legend


def _draw_curve(axis: Axes, results: Sequence[Result]) -> None:
    """Draw the time of the mode with the same bits over that of the fast mode."""
    all_counts: set[int] = set()
    for result, (colour, marker) in zip(results, _MODEL_STYLE * len(results), strict=False):
        curve = same_bits_costs(result.standings)
        if not curve:
            continue
        counts = sorted(curve)
        all_counts.update(counts)
        ratios = [curve[count] for count in counts]
        axis.plot(counts, ratios, color=colour, marker=marker, linewidth=2, label=result.model)
        axis.annotate(
            f"{ratios[-1]:.2f}",
            (counts[-1], ratios[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
        )
    axis.axhline(1.0, color=_PEER, linewidth=1, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(all_counts), [str(count) for count in sorted(all_counts)])
    axis.minorticks_off()
    axis.margins(x=0.12)
    axis.set_xlabel("microbatches", color=_INK)
    axis.set_title("cost of the same bits", loc="left", weight="bold", color=_INK)
    axis.set_title(
        "step time ÷ fast mode",
        loc="right",
        fontsize=8.5,
        color="#6b7280",
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.grid(True, color="#e5e7eb")
    axis.set_axisbelow(True)
    axis.legend(frameon=False, loc="upper left")


def _colour(name: str) -> str:
    if CONTESTANTS[name].of_phalanx:
        return _OURS_EXACT if name.startswith("trainer-m") else _OURS
    return _BY_HAND if name.endswith("-cl") else _PEER


def _ms(seconds: float) -> str:
    """Return milliseconds with three or four significant digits."""
    ms = 1e3 * seconds
    return f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"
