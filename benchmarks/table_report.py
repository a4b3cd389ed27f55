"""What of ``make bench-tables`` is a target, and the report. Nothing here runs anything."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine import Machine
from benchmarks.old_report import Column, Judged, Report, Row, Sheet
from benchmarks.panels import Line, Lines
from benchmarks.table_tasks import ARRAY_ELEMENTS, COLS, SIZES, TableTask

TITLES = {
    "phalanx": "Phalanx",
    "torch": "torch's kernels",
    "rpc": "torch RPC",
    "ray": "Ray actor",
}
_WAYS = {
    ("", False, False): "the other worker idle",
    ("", True, False): "the other at work too",
    ("", False, True): "idle, and other rows each time",
    ("keys ", False, False): "idle, and rows found by key",
}

Seconds = dict[str, dict[TableTask, list[list[float]]]]
"""Of every operation, by contestant, task and turn."""

Medians = Mapping[str, Mapping[TableTask, float]]
"""Median seconds by contestant and task."""

_MOST_US = {"get": 15.0, "add": 25.0}  # at 10 rows
_MOST_OVER_TORCH = {
    ("get", 1_000): 3.0,
    ("add", 1_000): 3.0,
    ("get", 100_000): 1.5,
    ("add", 100_000): 1.8,  # saving the old rows included
}
_LEAST_OVER_RPC = {"get": (25.0, 40.0, 10.0), "add": (10.0, 15.0, 1.5)}  # at SIZES
_LEAST_ARRAY_GB_PER_S = 6.0
_LEAST_SPEEDUP = 1.6
_LEAST_SNAPSHOT_GB_PER_S = 0.5
_ARRAY_BYTES = 4 * ARRAY_ELEMENTS


def judge(medians: Medians, snapshot_bytes: int) -> list[Row]:
    """Return every target, in the order of the issue; the other worker is idle, unless said.

    Example:
        >>> judge({"phalanx": {TableTask(kind="get", rows=10): 5e-6}}, 10**9)[0].cells
        (Judged(value=5.0, limit=15.0, at_least=False), 'µs')
    """
    rows = []

    def add(
        what: str, unit: str, aim: float, measured: float | None, *, at_least: bool = False
    ) -> None:
        rows.append(Row(what, (Judged(measured, aim, at_least), unit)))

    def found(name: str, kind: str, num_rows: int) -> float | None:
        return medians.get(name, {}).get(TableTask(kind=kind, rows=num_rows))

    for kind, aim in _MOST_US.items():
        add(f"{kind} 10 rows", "µs", aim, _us(found("phalanx", kind, 10)))
    for (kind, size), aim in _MOST_OVER_TORCH.items():
        ratio = _ratio(found("phalanx", kind, size), found("torch", kind, size))
        add(f"{kind} {size:,} rows, over torch's kernel", "×", aim, ratio)
    for kind, aims in _LEAST_OVER_RPC.items():
        for size, aim in zip(SIZES, aims, strict=True):
            ratio = _ratio(found("rpc", kind, size), found("phalanx", kind, size))
            what = f"{kind} {size:,} rows, torch RPC over ours"
            add(what, "×", aim, ratio, at_least=True)
    for kind in ("get", "add"):
        rate = gb_per_s(medians, "phalanx", f"array {kind}", _ARRAY_BYTES)
        what = f"{kind} the array of {_ARRAY_BYTES // 10**6} MB"
        add(what, "GB/s", _LEAST_ARRAY_GB_PER_S, rate, at_least=True)
    for size in SIZES[1:]:
        one, two = (medians.get("phalanx", {}).get(flood) for flood in _floods(size))
        what = f"adds of {size:,}, two workers over one"
        add(what, "×", _LEAST_SPEEDUP, _ratio(one, two), at_least=True)
    disk = gb_per_s(medians, "snapshot", "disk", snapshot_bytes)
    add(
        f"snapshot of {snapshot_bytes / 1e9:.2g} GB, the other worker adds",
        "GB/s",
        min(_LEAST_SNAPSHOT_GB_PER_S, _LEAST_SNAPSHOT_GB_PER_S if disk is None else disk),
        gb_per_s(medians, "snapshot", "snapshot", snapshot_bytes),
        at_least=True,
    )
    return rows


def gb_per_s(medians: Medians, name: str, kind: str, num_bytes: int) -> float | None:
    """Return a rate; bytes of the value count once."""
    for task, seconds in medians.get(name, {}).items():
        if task.kind == kind:
            return num_bytes / seconds / 1e9
    return None


def _floods(size: int) -> list[TableTask]:
    """Return the floods of one worker, and of two."""
    return [TableTask(kind="flood", rows=size, both=both, fresh=True) for both in (False, True)]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The operations of one contestant at one task that count."""

    median_s: float
    min_s: float
    num: int
    median_s_by_turn: Sequence[float]


def summarize(seconds: Seconds) -> dict[str, dict[TableTask, Summary]]:
    """Return what the seconds of every operation come to; without tasks never done."""
    return {
        name: {task: _summary(turns) for task, turns in by_task.items() if any(turns)}
        for name, by_task in seconds.items()
        if any(any(turns) for turns in by_task.values())
    }


def _summary(turns: Sequence[Sequence[float]]) -> Summary:
    found = [seconds for turn in turns for seconds in turn]
    return Summary(
        median_s=statistics.median(found),
        min_s=min(found),
        num=len(found),
        median_s_by_turn=[statistics.median(turn) for turn in turns if turn],
    )


def report_tables(
    seconds: Seconds,
    failures: Mapping[str, str],
    machine: Machine,
    command: str,
    *,
    rows: int,
    snapshot_bytes: int,
    **settings: Any,  # Any: JSON
) -> Report:
    """Return what get, add and snapshots took."""
    summaries = summarize(seconds)
    medians = {
        name: {task: summary.median_s for task, summary in by_task.items()}
        for name, by_task in summaries.items()
    }
    aims = Sheet(
        "Targets, the other worker idle and the same random rows each time unless said",
        (Column("measured"), Column("")),
        tuple(judge(medians, snapshot_bytes)),
    )
    return Report(
        name="tables",
        title=f"Random rows of {rows:,} × {COLS} float32",
        command=command,
        machine=machine,
        sheets=(_latencies_sheet(medians, rows), _rates_sheet(medians, snapshot_bytes)),
        panels=tuple(_panel(medians, kind) for kind in ("get", "add")),
        measured={
            "rows": rows,
            "snapshot_bytes": snapshot_bytes,
            **settings,
            "contestants": {
                name: [{**asdict(task), **asdict(found)} for task, found in by_task.items()]
                for name, by_task in summaries.items()
            },
        },
        failures=failures,
        aims=aims,
    )


def _latencies_sheet(medians: Medians, num_rows: int) -> Sheet:
    names = [name for name in TITLES if name in medians]
    rows: list[Row] = []
    for (found, both, fresh), words in _WAYS.items():
        rows.append(Row(words))
        for size in SIZES:
            for kind in ("get", "add"):
                task = TableTask(kind=found + kind, rows=size, both=both, fresh=fresh)
                cells = tuple(_us(medians[name].get(task)) for name in names)
                rows.append(Row(f"  {kind} {size:,}", cells))
    title = f"{num_rows:,} × {COLS} float32, 2 workers: median of one of them"
    return Sheet(title, tuple(Column(TITLES[name], "µs") for name in names), tuple(rows))


def _rates_sheet(medians: Medians, snapshot_bytes: int) -> Sheet:
    names = [name for name in ("phalanx", "torch") if name in medians]
    disk = ["snapshot"] if "snapshot" in medians else []
    rows = []

    def add(what: str, rates: list[float | None]) -> None:
        padding = [None] * (len(names) + len(disk) - len(rates))
        rows.append(Row(what, (*rates, *padding)))

    for kind in ("array get", "array add"):
        add(f"{kind}, GB/s", [gb_per_s(medians, name, kind, _ARRAY_BYTES) for name in names])
    for size in SIZES[1:]:
        for flood, who in zip(_floods(size), ("one worker", "two workers"), strict=True):
            rates = [_ratio(1e-6, medians[name].get(flood)) for name in names]
            add(f"{who}, adds of {size:,}, M rows/s", rates)
    if disk:
        for kind, what in (("snapshot", "snapshot"), ("disk", "writing and syncing as much")):
            rate = gb_per_s(medians, "snapshot", kind, snapshot_bytes)
            add(f"{what}, GB/s", [*(None,) * len(names), rate])
    columns = [*(Column(TITLES[name]) for name in names), *(Column("disk") for _ in disk)]
    title = "How much per second; of adds by one worker or two"
    return Sheet(title, tuple(columns), tuple(rows))


def _panel(medians: Medians, kind: str) -> Lines:
    lines = []
    for name in TITLES:
        found = {size: medians.get(name, {}).get(TableTask(kind=kind, rows=size)) for size in SIZES}
        points = tuple((size, 1e6 * seconds) for size, seconds in found.items() if seconds)
        if points:
            lines.append(Line(label=TITLES[name], points=points, ours=name == "phalanx"))
    return Lines(
        title=kind,
        note="median µs of one of 2 workers, the other idle",
        lines=tuple(lines),
        ticks={float(size): f"{size:,} rows" for size in SIZES},
        log_x=True,
        log_y=True,
    )
