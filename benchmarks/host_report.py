"""What of ``make bench-hosts`` is a target, and the report. Nothing here runs anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.host_tasks import ADDED_ROWS, TASKS_OF_ALL
from benchmarks.machine import Machine
from benchmarks.old_report import Column, Judged, Report, Row, Sheet
from benchmarks.panels import Bar, Bars, Line, Lines
from benchmarks.table_report import Medians, Seconds, summarize
from benchmarks.table_tasks import COLS, SIZES, TableTask

TITLES = {
    "phalanx": "Phalanx",
    "encrypted": "encrypted",
    "one-host": "one host",
    "rpc": "torch RPC",
    "ray": "Ray actor",
    "socket": "TCP socket",
}
_OURS = ("phalanx", "encrypted", "one-host")
_WAYS = {"": "the other host's", "local ": "its own host's"}
(_FLOOD,) = TASKS_OF_ALL

_MOST_US = 500.0  # of a get of 1,000 rows
_LEAST_OVER_RPC = 3.0
_LEAST_OF_SOCKET = {"phalanx": 0.5, "encrypted": 0.25}  # of its bandwidth
_LEAST_ADDS_PER_S = 10_000.0
_MOST_OVER_ONE_HOST = 1.05


def judge(medians: Medians) -> list[Row]:
    """Return every target, in the order of the issue.

    Example:
        >>> judge({"phalanx": {TableTask(kind="get", rows=1_000): 2e-4}})[0].cells
        (Judged(value=200.0, limit=500.0, at_least=False), 'µs')
    """

    def found(name: str, kind: str, num_rows: int) -> float | None:
        return medians.get(name, {}).get(TableTask(kind=kind, rows=num_rows))

    get = found("phalanx", "get", 1_000)
    faster = _ratio(found("rpc", "get", 1_000), get)
    rows = [
        Row("get 1,000 rows", (Judged(_us(get), _MOST_US), "µs")),
        Row("the same, torch RPC over ours", (Judged(faster, _LEAST_OVER_RPC, at_least=True), "×")),
    ]
    for name, aim in _LEAST_OF_SOCKET.items():
        of_socket = _ratio(found("socket", "get", 100_000), found(name, "get", 100_000))
        what = f"get 100,000 rows, {TITLES[name]}: of the socket's bandwidth"
        rows.append(Row(what, (Judged(of_socket, aim, at_least=True), "×")))
    rate = adds_per_s(medians, "phalanx")
    what = f"adds of {ADDED_ROWS} rows, all clients"
    rows.append(Row(what, (Judged(rate, _LEAST_ADDS_PER_S, at_least=True), "1/s")))
    for kind in ("get", "add"):
        for size in SIZES:
            local, one_host = (
                found(name, f"local {kind}", size) for name in ("phalanx", "one-host")
            )
            what = f"{kind} {size:,} of its own host, over one host's table"
            rows.append(Row(what, (Judged(_ratio(local, one_host), _MOST_OVER_ONE_HOST), "×")))
    return rows


def adds_per_s(medians: Medians, name: str) -> float | None:
    """Return how many small adds all clients together made per second."""
    return _ratio(1.0, medians.get(name, {}).get(_FLOOD))


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def report_hosts(
    seconds: Seconds,
    failures: Mapping[str, str],
    machine: Machine,
    command: str,
    *,
    rows: int,
    clients: int,
    **settings: Any,  # Any: JSON
) -> Report:
    """Return what get and add between hosts took."""
    summaries = summarize(seconds)
    medians = {
        name: {task: summary.median_s for task, summary in by_task.items()}
        for name, by_task in summaries.items()
    }
    aims = Sheet("Targets", (Column("measured"), Column("")), tuple(judge(medians)))
    return Report(
        name="hosts",
        title=f"Rows of another host, {rows:,} × {COLS} float32",
        command=command,
        machine=machine,
        sheets=(_latencies_sheet(medians), _rates_sheet(medians, clients)),
        panels=(_latencies_panel(medians), _adds_panel(medians, clients)),
        measured={
            "rows": rows,
            "clients": clients,
            **settings,
            "contestants": {
                name: [{**asdict(task), **asdict(found)} for task, found in by_task.items()]
                for name, by_task in summaries.items()
            },
        },
        failures=failures,
        aims=aims,
    )


def _names(medians: Medians) -> list[str]:
    return [name for name in TITLES if name in medians]


def _latencies_sheet(medians: Medians) -> Sheet:
    names, rows = _names(medians), []
    for place, words in _WAYS.items():
        rows.append(Row(words))
        for size in SIZES:
            for kind in ("get", "add"):
                task = TableTask(kind=f"{place}{kind}", rows=size)
                cells = tuple(_us(medians[name].get(task)) for name in names)
                rows.append(Row(f"  {kind} {size:,}", cells))
    columns = tuple(Column(TITLES[name], "µs") for name in names)
    return Sheet("Rows as one client gets and adds to them: median", columns, tuple(rows))


def _rates_sheet(medians: Medians, clients: int) -> Sheet:
    names, large = _names(medians), TableTask(kind="get", rows=SIZES[-1])
    gb = 4 * COLS * SIZES[-1] / 1e9
    rates = tuple(_ratio(gb, medians[name].get(large)) for name in names)
    adds = tuple(adds_per_s(medians, name) for name in names)
    rows = (Row(f"get {SIZES[-1]:,}, GB/s", rates), Row(f"adds of {ADDED_ROWS}, 1/s", adds))
    title = f"How much per second; adds by {clients} clients at once"
    return Sheet(title, tuple(Column(TITLES[name]) for name in names), rows)


def _latencies_panel(medians: Medians) -> Lines:
    lines = []
    for name in _names(medians):
        found = {size: medians[name].get(TableTask(kind="get", rows=size)) for size in SIZES}
        points = tuple((size, 1e6 * seconds) for size, seconds in found.items() if seconds)
        if points:
            lines.append(Line(label=TITLES[name], points=points, ours=name in _OURS))
    return Lines(
        title="get",
        note="median µs of one client",
        lines=tuple(lines),
        ticks={float(size): f"{size:,} rows" for size in SIZES},
        log_x=True,
        log_y=True,
    )


def _adds_panel(medians: Medians, clients: int) -> Bars:
    rates = {name: adds_per_s(medians, name) for name in _names(medians)}
    bars = tuple(
        Bar(label=TITLES[name], parts=(rate,), text=f"{rate:,.0f}", ours=name in _OURS)
        for name, rate in rates.items()
        if rate is not None
    )
    note = f"per s, {clients} clients"
    return Bars(title=f"adds of {ADDED_ROWS} rows", note=note, bars=bars)
