"""What of ``make bench-tables`` is a target, and the report. Nothing here runs anything."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine import Machine
from benchmarks.panels import Line, Lines
from benchmarks.report import Column, Judged, Report, Row, Sheet
from benchmarks.table_tasks import ARRAY_ELEMENTS, COLS, SIZES, TableTask

__all__ = ["TITLES", "Summary", "judge", "report_tables", "summarize"]

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

Medians = Mapping[str, Mapping[TableTask, float]]
"""Median seconds by contestant and task."""

_MOST_US = {"get": 15.0, "add": 25.0}  # at 10 rows
_MOST_OVER_TORCH = {
    ("get", 1_000): 3.0,
    ("add", 1_000): 3.0,
    ("get", 100_000): 1.5,
    ("add", 100_000): 1.8,  # the undo record included
}
_LEAST_OVER_RPC = {"get": (25.0, 40.0, 10.0), "add": (10.0, 15.0, 1.5)}  # at SIZES
_LEAST_ARRAY_GB_PER_S = 6.0
_LEAST_SPEEDUP = 1.6
_LEAST_SNAPSHOT_GB_PER_S = 0.5


def judge(medians: Medians, snapshot_bytes: int) -> list[Row]:
    """Return every target, in the order of the issue; the other worker is idle, unless said.

    Example:
        >>> judge({"phalanx": {TableTask(kind="get", rows=10): 5e-6}}, 10**9)[0].cells
        (Judged(value=5.0, limit=15.0, at_least=False), 'µs')
    """
    return [*_latencies(medians), *_rates(medians, snapshot_bytes)]


def _latencies(medians: Medians) -> Iterator[Row]:
    for kind, aim in _MOST_US.items():
        ours = medians.get("phalanx", {}).get(TableTask(kind=kind, rows=10))
        yield _row(
            f"{kind} {_count(10)}",
            "µs",
            aim,
            None if ours is None else 1e6 * ours,
        )
    for (kind, rows), aim in _MOST_OVER_TORCH.items():
        task = TableTask(kind=kind, rows=rows)
        yield _row(
            f"{kind} {_count(rows)}, over torch's kernel",
            "×",
            aim,
            _ratio(medians, ("phalanx", task), ("torch", task)),
        )
    for kind, aims in _LEAST_OVER_RPC.items():
        for rows, aim in zip(SIZES, aims, strict=True):
            task = TableTask(kind=kind, rows=rows)
            yield _row(
                f"{kind} {_count(rows)}, torch RPC over ours",
                "×",
                aim,
                _ratio(medians, ("rpc", task), ("phalanx", task)),
                at_least=True,
            )


def _rates(medians: Medians, snapshot_bytes: int) -> Iterator[Row]:
    for kind in ("get", "add"):
        yield _row(
            f"{kind} the array of {4 * ARRAY_ELEMENTS // 10**6} MB",
            "GB/s",
            _LEAST_ARRAY_GB_PER_S,
            gb_per_s(medians, "phalanx", f"array {kind}", 4 * ARRAY_ELEMENTS),
            at_least=True,
        )
    for rows in SIZES[1:]:
        one, two = (
            TableTask(kind="flood", rows=rows, both=both, fresh=True) for both in (False, True)
        )
        yield _row(
            f"adds of {rows:,}, two workers over one, 4 shards",
            "×",
            _LEAST_SPEEDUP,
            _ratio(medians, ("phalanx", one), ("phalanx", two)),
            at_least=True,
        )
    disk = gb_per_s(medians, "snapshot", "disk", snapshot_bytes)
    yield _row(
        f"snapshot of {snapshot_bytes / 1e9:.2g} GB, the other worker adds",
        "GB/s",
        min(_LEAST_SNAPSHOT_GB_PER_S, _LEAST_SNAPSHOT_GB_PER_S if disk is None else disk),
        gb_per_s(medians, "snapshot", "snapshot", snapshot_bytes),
        at_least=True,
    )


def gb_per_s(medians: Medians, name: str, kind: str, num_bytes: int) -> float | None:
    """Return a rate; bytes of the value count once."""
    for task, seconds in medians.get(name, {}).items():
        if task.kind == kind:
            return num_bytes / seconds / 1e9
    return None


def flood_rows_per_s(medians: Medians, name: str, task: TableTask) -> float | None:
    """Return how many rows all workers at work have added per second."""
    seconds = medians.get(name, {}).get(task)
    return None if seconds is None else 1 / seconds


def _ratio(
    medians: Medians, above: tuple[str, TableTask], below: tuple[str, TableTask]
) -> float | None:
    found = [medians.get(name, {}).get(task) for name, task in (above, below)]
    return None if None in found else found[0] / found[1]  # type: ignore[operator]


def _count(rows: int) -> str:
    return f"{rows:,} rows"


def _row(
    what: str, unit: str, aim: float, measured: float | None, *, at_least: bool = False
) -> Row:
    return Row(what, (Judged(measured, aim, at_least), unit))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The operations of one contestant at one task that count."""

    median_s: float
    min_s: float
    num: int
    median_s_by_turn: Sequence[float]


Summaries = Mapping[str, Mapping[TableTask, Summary]]
"""By contestant and task."""


def summarize(seconds: Mapping[str, Mapping[TableTask, Sequence[Sequence[float]]]]) -> Summaries:
    """Return what the seconds of every operation, by turn, come to; without tasks never done."""
    return {
        name: {task: _summary(turns) for task, turns in by_task.items() if any(turns)}
        for name, by_task in seconds.items()
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
    summaries: Summaries,
    failures: Mapping[str, str],
    machine: Machine,
    command: str,
    *,
    rows: int,
    snapshot_bytes: int,
    **settings: Any,  # Any: JSON
) -> Report:
    """Return what get, add and snapshots took."""
    medians = {
        name: {task: summary.median_s for task, summary in by_task.items()}
        for name, by_task in summaries.items()
    }
    targets = Sheet(
        "Targets, the other worker idle and the same random rows each time unless said",
        (Column("measured"), Column("")),
        tuple(judge(medians, snapshot_bytes)),
    )
    return Report(
        name="tables",
        title=f"Random rows of {rows:,} × {COLS} float32",
        command=command,
        machine=machine,
        sheets=(_latencies_sheet(medians, rows), _rates_sheet(medians, snapshot_bytes), targets),
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
    rows = []
    for kind in ("array get", "array add"):
        rates = [gb_per_s(medians, name, kind, 4 * ARRAY_ELEMENTS) for name in names]
        rows.append(Row(f"{kind}, GB/s", tuple(rates)))
    for size in SIZES[1:]:
        for both in (False, True):
            task = TableTask(kind="flood", rows=size, both=both, fresh=True)
            found = [flood_rows_per_s(medians, name, task) for name in names]
            cells = tuple(None if rate is None else rate / 1e6 for rate in found)
            who = "two workers" if both else "one worker"
            rows.append(Row(f"{who}, adds of {size:,}, M rows/s", cells))
    columns = [Column(TITLES[name]) for name in names]
    if "snapshot" in medians:
        blank = (None,) * len(names)
        for kind, what in (("snapshot", "snapshot"), ("disk", "writing and syncing as much")):
            rate = gb_per_s(medians, "snapshot", kind, snapshot_bytes)
            rows.append(Row(f"{what}, GB/s", (*blank, rate)))
        rows = [Row(row.label, (*row.cells, *(None,) * (len(names) + 1 - len(row.cells))))
                for row in rows]  # fmt: skip
        columns.append(Column("disk"))
    title = "How much per second; of adds by one worker or two, to 4 shards (torch: no shards)"
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


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds
