"""What the contestants' steps come to: the report of ``make bench-step``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.arena import Outcome, Pace
from benchmarks.contestants import CONTESTANTS
from benchmarks.machine import Machine
from benchmarks.panels import Bar, Bars, Line, Lines
from benchmarks.report import Cell, Column, Report, Row, Sheet, number
from benchmarks.standings import BASELINES, Standing, ideals, overheads, same_bits_costs

__all__ = ["Result", "main_rows", "report_step", "title"]


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


def report_step(results: Sequence[Result], machine: Machine, pace: Pace, command: str) -> Report:
    """Return the report: tables by model, what sharing the work costs, and what the same bits."""
    sheets = [_model_sheet(result) for result in results]
    panels: list[Bars | Lines] = [_bars(result) for result in results]
    if any(ideals(result.standings, result.workers) for result in results):
        sheets += _overhead_sheets(results)
    if any(same_bits_costs(result.standings) for result in results):
        sheets.append(_curve_sheet(results))
        panels.append(_curve_panel(results))
    return Report(
        name="step",
        title="One training step, Phalanx beside its peers",
        command=command,
        machine=machine,
        sheets=tuple(sheets),
        panels=tuple(panels),
        measured={
            "pace": asdict(pace),
            "models": {result.model: _measured(result) for result in results},
        },
        failures={
            f"{title(name, result.workers)} on {result.model}": cause
            for result in results
            for name, cause in result.outcome.failures.items()
        },
    )


# Any: the values of JSON objects are of all kinds.
def _measured(result: Result) -> Mapping[str, Any]:
    return {
        "workers": result.workers,
        "seconds_by_round": {
            standing.name: result.outcome.seconds[standing.name] for standing in result.standings
        },
    }


def _model_sheet(result: Result) -> Sheet:
    columns = (
        Column("median", "ms"),
        Column("min", "ms"),
        Column("÷ DDP"),
        Column(f"÷ {result.workers} threads"),
        Column("÷ Trainer"),
    )
    rows = []
    for standing in main_rows(result.standings):
        ratios: list[Cell] = [
            standing.judged.get(baseline, standing.ratio_by_baseline.get(baseline))
            for baseline in BASELINES
        ]
        cells = (1e3 * standing.median_s, 1e3 * standing.min_s, *ratios)
        ours = CONTESTANTS[standing.name].of_phalanx
        rows.append(Row(title(standing.name, result.workers), cells, ours=ours))
    return Sheet(f"{result.model}: one training step", columns, tuple(rows))


def _overhead_sheets(results: Sequence[Result]) -> tuple[Sheet, Sheet]:
    """Return the multiples of the ideal, and the ms beyond it; a column per model and ideal."""
    workers = results[0].workers
    found = [
        (result.model, ideal, ideal_s, overheads(result.standings, result.workers)[ideal])
        for result in results
        for ideal, ideal_s in ideals(result.standings, result.workers).items()
    ]
    columns = tuple(
        Column(f"{model}\nchannels_last" if ideal.endswith("-cl") else model)
        for model, ideal, _, _ in found
    )
    ideals_ms = tuple(1e3 * ideal_s for _, _, ideal_s, _ in found)
    ratios: list[Row] = []
    extras = [Row(f"ideal: 1 thread's time ÷ {workers}", ideals_ms)]
    shown = {row.name for result in results for row in main_rows(result.standings)}
    for name, contestant in CONTESTANTS.items():
        if contestant.of_phalanx and name in shown:
            costs = [cost_by_name.get(name) for *_, cost_by_name in found]
            label = title(name, workers)
            ratios.append(
                Row(label, tuple(cost.ratio if cost else None for cost in costs), ours=True)
            )
            beyond = tuple(1e3 * cost.extra_s if cost else None for cost in costs)
            extras.append(Row(label, beyond, ours=True))
    return (
        Sheet("overhead: multiple of the ideal", columns, tuple(ratios)),
        Sheet("overhead: ms beyond the ideal", columns, tuple(extras)),
    )


def _curve_sheet(results: Sequence[Result]) -> Sheet:
    curves = {result.model: same_bits_costs(result.standings) for result in results}
    counts = sorted({count for curve in curves.values() for count in curve})
    return Sheet(
        "cost of the same bits by number of microbatches: ÷ Trainer",
        tuple(Column(str(count)) for count in counts),
        tuple(
            Row(model, tuple(curve.get(count) for count in counts))
            for model, curve in curves.items()
        ),
    )


def _bars(result: Result) -> Bars:
    """Return medians as bars, the fastest step as a dot, and the ratio to DDP beside them."""
    bars = []
    for standing in main_rows(result.standings):
        median_ms = 1e3 * standing.median_s
        ratio = standing.ratio_by_baseline.get("ddp")
        beside = "" if ratio is None or standing.name == "ddp" else f"  {ratio:.2f}×"
        bars.append(
            Bar(
                label=title(standing.name, result.workers),
                parts=(median_ms,),
                text=f"{number(median_ms)}{beside}",
                ours=CONTESTANTS[standing.name].of_phalanx,
                dots=(1e3 * standing.min_s,),
            )
        )
    guides = {
        "ideal, channels_last" if ideal.endswith("-cl") else "ideal": 1e3 * ideal_s
        for ideal, ideal_s in ideals(result.standings, result.workers).items()
    }
    note = "median ms, × DDP; dot: fastest step"
    return Bars(title=result.model, note=note, bars=tuple(bars), guides=guides)


def _curve_panel(results: Sequence[Result]) -> Lines:
    curves = {result.model: same_bits_costs(result.standings) for result in results}
    counts = sorted({count for curve in curves.values() for count in curve})
    return Lines(
        title="cost of the same bits",
        note="step time ÷ fast mode, by microbatches",
        lines=tuple(
            Line(label=model, points=tuple(sorted(curve.items())), ours=True)
            for model, curve in curves.items()
            if curve
        ),
        levels={"fast mode": 1.0},
        ticks={float(count): str(count) for count in counts},
        log_x=True,
    )
