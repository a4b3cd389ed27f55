"""What the contestants' steps come to: the targets and the report of ``make bench-step``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from benchmarks.contestants import CONTESTANTS
from benchmarks.machine import Machine
from benchmarks.panels import Bar, Bars, Line, Lines
from benchmarks.report import Cell, Column, Judged, Report, Row, Sheet, number
from benchmarks.turns import Outcome, Pace

# The contestants that others are measured against: the peer, plain PyTorch, ours by slices.
BASELINES = ("ddp", "threads", "trainer")

# Those whose time, shared out among the workers, is the ideal: one core's, with nothing beside it.
IDEALS = ("single",)

TARGET_WORKERS = 2  # the targets were set for as many

# By contestant and baseline, and by model: the median is at most so many times the baseline's.
TARGETS = {
    ("trainer", "ddp"): {"mlp": 0.45, "cnn": 0.65, "gpt": 0.85},
    ("trainer", "threads"): {"mlp": 1.0, "cnn": 1.05, "gpt": 1.0},
    ("trainer-m4", "trainer"): {"mlp": 1.4, "cnn": 1.15, "gpt": 1.15},
    ("processes", "ddp"): {"mlp": 0.45, "cnn": 0.65, "gpt": 0.85},
    ("processes", "trainer"): {"cnn": 1.05, "gpt": 1.05},
    ("ddp-phalanx", "ddp"): {"mlp": 0.65, "cnn": 0.85},
    ("dataparallel", "ddp"): {"mlp": 0.55, "cnn": 0.7, "gpt": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model's contest."""

    model: str
    workers: int
    outcome: Outcome

    @cached_property
    def medians_s(self) -> dict[str, float]:
        """The median of all steps, by contestant."""
        return {
            name: statistics.median(step for turn in turns for step in turn)
            for name, turns in self.outcome.seconds.items()
        }

    def min_s(self, name: str) -> float:
        """Return a contestant's fastest step."""
        return min(min(turn) for turn in self.outcome.seconds[name])

    def ratio(self, name: str, baseline: str) -> float | None:
        """Return a contestant's median over a baseline's, if that has run."""
        base_s = self.medians_s.get(baseline)
        return None if base_s is None else self.medians_s[name] / base_s

    def judged(self, name: str, baseline: str) -> Cell:
        """Return the ratio, with its target if it has one."""
        ratio = self.ratio(name, baseline)
        limit = TARGETS.get((name, baseline), {}).get(self.model)
        if ratio is None or limit is None or self.workers != TARGET_WORKERS:
            return ratio
        return Judged(ratio, limit)

    @cached_property
    def ideals_s(self) -> dict[str, float]:
        """The seconds that the workers would take if sharing the work cost nothing.

        By contestant of `IDEALS`: its median, divided by the workers. It is no bound: a contestant
        that lays out memory better may fall below it.
        """
        medians_s = self.medians_s
        return {name: medians_s[name] / self.workers for name in IDEALS if name in medians_s}

    @cached_property
    def same_bits_costs(self) -> dict[int, float]:
        """The median over that without microbatches, by number of microbatches."""
        return {
            int(name.removeprefix("trainer-m")): median_s / self.medians_s["trainer"]
            for name, median_s in self.medians_s.items()
            if name.startswith("trainer-m") and "trainer" in self.medians_s
        }

    @property
    def main_rows(self) -> list[str]:
        """The contestants that are rows of the table; the rest are points of the curve.

        Without a contestant of `microbatches=None` there is no curve, and nothing is left out.
        """
        in_curve = {f"trainer-m{count}" for count in self.same_bits_costs} - {"trainer-m4"}
        return [name for name in self.medians_s if name not in in_curve]


def title(name: str, workers: int) -> str:
    """Return what the reader calls a contestant."""
    return CONTESTANTS[name].title.format(workers=workers)


def report_step(results: Sequence[Result], machine: Machine, pace: Pace, command: str) -> Report:
    """Return the report: tables by model, what sharing the work costs, and what the same bits."""
    sheets = [_model_sheet(result) for result in results]
    panels: list[Bars | Lines] = [_bars(result) for result in results]
    if any(result.ideals_s for result in results):
        sheets += _overhead_sheets(results)
    if counts := sorted({count for result in results for count in result.same_bits_costs}):
        sheets.append(_curve_sheet(results, counts))
        panels.append(_curve_panel(results, counts))
    return Report(
        name="step",
        title="One training step, Phalanx beside its peers",
        command=command,
        machine=machine,
        sheets=tuple(sheets),
        panels=tuple(panels),
        measured={
            "pace": asdict(pace),
            "models": {
                result.model: {
                    "workers": result.workers,
                    "seconds_by_round": result.outcome.seconds,
                }
                for result in results
            },
        },
        failures={
            f"{title(name, result.workers)} on {result.model}": cause
            for result in results
            for name, cause in result.outcome.failures.items()
        },
    )


def _model_sheet(result: Result) -> Sheet:
    columns = (
        Column("median", "ms"),
        Column("min", "ms"),
        Column("÷ DDP"),
        Column(f"÷ {result.workers} threads"),
        Column("÷ Trainer"),
    )
    rows = []
    for name in result.main_rows:
        ratios = [result.judged(name, baseline) for baseline in BASELINES]
        cells = (1e3 * result.medians_s[name], 1e3 * result.min_s(name), *ratios)
        rows.append(Row(title(name, result.workers), cells, ours=CONTESTANTS[name].of_phalanx))
    return Sheet(f"{result.model}: one training step", columns, tuple(rows))


def _overhead_sheets(results: Sequence[Result]) -> tuple[Sheet, Sheet]:
    """Return the multiples of the ideal, and the ms beyond it; a column per model and ideal."""
    workers = results[0].workers
    found = [(result, ideal, s) for result in results for ideal, s in result.ideals_s.items()]
    columns = tuple(Column(result.model) for result, _, _ in found)
    ratios: list[Row] = []
    ideals_ms = tuple(1e3 * ideal_s for *_, ideal_s in found)
    extras = [Row(f"ideal: 1 thread's time ÷ {workers}", ideals_ms)]
    shown = {name for result in results for name in result.main_rows}
    for name, contestant in CONTESTANTS.items():
        if contestant.of_phalanx and name in shown:
            label = title(name, workers)
            pairs = [(result.medians_s.get(name), ideal_s) for result, _, ideal_s in found]
            times = tuple(s / ideal_s if s else None for s, ideal_s in pairs)
            beyond = tuple(1e3 * (s - ideal_s) if s else None for s, ideal_s in pairs)
            ratios.append(Row(label, times, ours=True))
            extras.append(Row(label, beyond, ours=True))
    return (
        Sheet("overhead: multiple of the ideal", columns, tuple(ratios)),
        Sheet("overhead: ms beyond the ideal", columns, tuple(extras)),
    )


def _curve_sheet(results: Sequence[Result], counts: Sequence[int]) -> Sheet:
    rows = [Row(each.model, tuple(map(each.same_bits_costs.get, counts))) for each in results]
    columns = tuple(Column(str(count)) for count in counts)
    title = "cost of the same bits by number of microbatches: ÷ Trainer"
    return Sheet(title, columns, tuple(rows))


def _bars(result: Result) -> Bars:
    """Return medians as bars, the fastest step as a dot, and the ratio to DDP beside them."""
    bars = []
    for name in result.main_rows:
        median_ms, ratio = 1e3 * result.medians_s[name], result.ratio(name, "ddp")
        beside = "" if ratio is None or name == "ddp" else f"  {ratio:.2f}×"
        bars.append(
            Bar(
                label=title(name, result.workers),
                parts=(median_ms,),
                text=f"{number(median_ms)}{beside}",
                ours=CONTESTANTS[name].of_phalanx,
                dots=(1e3 * result.min_s(name),),
            )
        )
    guides = {"ideal": 1e3 * result.ideals_s[IDEALS[0]]} if result.ideals_s else {}
    note = "median ms, × DDP; dot: fastest step"
    return Bars(title=result.model, note=note, bars=tuple(bars), guides=guides)


def _curve_panel(results: Sequence[Result], counts: Sequence[int]) -> Lines:
    return Lines(
        title="cost of the same bits",
        note="step time ÷ that of microbatches=None, by microbatches",
        lines=tuple(
            Line(label=each.model, points=tuple(sorted(each.same_bits_costs.items())), ours=True)
            for each in results
            if each.same_bits_costs
        ),
        levels={"microbatches=None": 1.0},
        ticks={float(count): str(count) for count in counts},
        log_x=True,
    )
