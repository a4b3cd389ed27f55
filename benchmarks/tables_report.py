"""What ``make bench-tables`` has shown: tables, JSON, and a figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.machine import Machine
from benchmarks.record import headlines
from benchmarks.table_standings import Verdict, flood_rows_per_s, gb_per_s, judge
from benchmarks.table_tasks import ARRAY_ELEMENTS, COLS, SIZES, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SCHEMA", "Results", "as_json", "draw_tables", "latency_table", "rate_table", "verdicts"]

SCHEMA = "phalanx.bench.tables/1"
TITLES = {
    "phalanx": "Phalanx",
    "torch": "torch's kernels",
    "rpc": "torch RPC",
    "ray": "Ray actor",
}
_COLOURS = {"phalanx": "#0f766e", "torch": "#9ca3af", "rpc": "#b45309", "ray": "#7c3aed"}
_WAYS = {
    ("", False, False): "the other worker idle",
    ("", True, False): "the other at work too",
    ("", False, True): "idle, and other rows each time",
    ("keys ", False, False): "idle, and rows found by key",
}
_GREY, _INK = "#6b7280", "#1f2933"


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured.

    Args:
        seconds: By contestant and task, of each operation that counts, by turn.
        failures: Why contestants fell out.
        rows: Of the matrix.
        snapshot_bytes: Of the table of which a snapshot is taken.
    """

    seconds: Mapping[str, Mapping[Task, list[list[float]]]]
    failures: Mapping[str, str]
    rows: int
    snapshot_bytes: int

    @property
    def medians(self) -> dict[str, dict[Task, float]]:
        """Median seconds by contestant and task."""
        medians: dict[str, dict[Task, float]] = {}
        for name, seconds_by_task in self.seconds.items():
            medians[name] = {}
            for task, turns in seconds_by_task.items():
                found = [seconds for turn in turns for seconds in turn]
                if found:
                    medians[name][task] = statistics.median(found)
        return medians


def verdicts(results: Results) -> list[Verdict]:
    """Return how the targets were met."""
    return judge(results.medians, results.snapshot_bytes)


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
        show_edge=False,
    )  # fmt: skip


def latency_table(results: Results) -> Table:
    """Return the medians of worker 0, in microseconds."""
    medians = results.medians
    names = [name for name in TITLES if name in medians]
    table = _table(f"{results.rows:,} × {COLS} float32, 2 workers: median µs of one of them")
    table.add_column("random rows", no_wrap=True)
    for name in names:
        table.add_column(TITLES[name], justify="right", no_wrap=True)
    for (found, both, fresh), words in _WAYS.items():
        table.add_section()
        table.add_row(Text(words, style="bold"))
        for rows in SIZES:
            for kind in ("get", "add"):
                task = Task(kind=found + kind, rows=rows, both=both, fresh=fresh)
                cells = [_us(medians[name].get(task)) for name in names]
                table.add_row(f"  {kind} {rows:,}", *cells)
    return table


def rate_table(results: Results) -> Table:
    """Return arrays, floods and the disk, as rates."""
    medians = results.medians
    names = [name for name in ("phalanx", "torch") if name in medians]
    table = _table(
        "How much per second; of adds by one worker or two, to 4 shards (torch: no shards)"
    )
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(TITLES[name], justify="right", no_wrap=True)
    for kind in ("array get", "array add"):
        rates = [gb_per_s(medians, name, kind, 4 * ARRAY_ELEMENTS) for name in names]
        table.add_row(f"{kind}, GB/s", *map(_number, rates))
    for rows in SIZES[1:]:
        for both in (False, True):
            task = Task(kind="flood", rows=rows, both=both, fresh=True)
            found = [flood_rows_per_s(medians, name, task) for name in names]
            cells = [_number(None if rate is None else rate / 1e6) for rate in found]
            who = "two workers" if both else "one worker"
            table.add_row(f"{who}, adds of {rows:,}, M rows/s", *cells)
    for kind in ("snapshot", "disk"):
        rate = gb_per_s(medians, "snapshot", kind, results.snapshot_bytes)
        what = "snapshot" if kind == "snapshot" else "writing and syncing as much"
        table.add_row(f"{what}, GB/s", _number(rate))
    return table


def target_table(results: Results) -> Table:
    """Return the targets, each marked as met or missed."""
    table = _table("Targets, the other worker idle and the same random rows each time unless said")
    for heading in ("", "aim", "measured", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for verdict in verdicts(results):
        bound = "≤" if verdict.at_most else "≥"
        met = verdict.met
        mark = {True: Text("✓", "green"), False: Text("✗", "red"), None: Text("–")}[met]
        aim, measured = _number(verdict.aim), _number(verdict.measured)
        table.add_row(verdict.what, f"{bound} {aim} {verdict.unit}", measured, mark)
    return table


def as_json(results: Results, machine: Machine, **settings: Any) -> str:  # Any: JSON
    """Return everything that was measured, down to the single turn's median."""
    report = {
        "schema": SCHEMA,
        "machine": asdict(machine),
        "rows": results.rows,
        "snapshot_bytes": results.snapshot_bytes,
        **settings,
        "contestants": {
            name: [_as_dict(task, turns) for task, turns in by_task.items() if any(turns)]
            for name, by_task in results.seconds.items()
        },
        "targets": [{**asdict(each), "met": each.met} for each in verdicts(results)],
        "failures": headlines(results.failures),
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


# Any: the values of JSON objects are of all kinds.
def _as_dict(task: Task, turns: Sequence[Sequence[float]]) -> Mapping[str, Any]:
    found = [seconds for turn in turns for seconds in turn]
    return {
        **asdict(task),
        "median_s": statistics.median(found),
        "min_s": min(found),
        "num": len(found),
        "median_s_by_turn": [statistics.median(turn) for turn in turns if turn],
    }


def draw_tables(results: Results, machine: Machine, path: Path) -> None:
    """Draw the latencies as bars on a logarithmic axis, into a PNG file."""
    # Slow: half a second that no contestant's process should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, kind in zip(figure.subplots(1, 2, sharey=True), ("get", "add"), strict=True):
        _draw_bars(axis, results.medians, kind)
    figure.suptitle(
        f"Random rows of {results.rows:,} × {COLS} float32, µs", fontsize=15, weight="bold",
        color=_INK,
    )  # fmt: skip
    commit = f" · commit {machine.commit}" if machine.commit else ""
    figure.supxlabel(
        f"median of one of 2 workers, the other idle · {machine.cpu}, {machine.cores} cores · "
        f"torch {machine.torch} · phalanx {machine.phalanx}{commit} · {machine.date}",
        fontsize=8.5,
        color=_GREY,
    )
    figure.savefig(path, dpi=130)


def _draw_bars(axis: Axes, medians: Mapping[str, Mapping[Task, float]], kind: str) -> None:
    names = [name for name in TITLES if name in medians]
    for place, name in enumerate(names):
        for group, rows in enumerate(SIZES):
            seconds = medians[name].get(Task(kind=kind, rows=rows))
            if seconds is None:
                continue
            left = group + (place - (len(names) - 1) / 2) * 0.2
            label = TITLES[name] if group == 0 else None
            axis.bar(left, 1e6 * seconds, width=0.19, color=_COLOURS[name], label=label)
            axis.annotate(
                _us(seconds), (left, 1e6 * seconds), ha="center", va="bottom", fontsize=7,
                color=_INK,
            )  # fmt: skip
    axis.set_yscale("log")
    axis.set_xticks(range(len(SIZES)), [f"{rows:,} rows" for rows in SIZES])
    axis.set_title(kind, fontsize=12, color=_INK)
    axis.spines[["top", "right"]].set_visible(False)
    if names:
        axis.legend(frameon=False, fontsize=9, loc="upper left")


def _us(seconds: float | None) -> str:
    return _number(None if seconds is None else 1e6 * seconds)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
