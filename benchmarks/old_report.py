"""One report for all benchmarks: what was measured and on what, tables, a figure.

measured numbers ──► Report ──► tables in the terminal, NAME.json, NAME.png

Targets are for developers: they are shown with `--aims` only, and stand in the JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.machine import Machine
from benchmarks.panels import Panel, draw

SCHEMA = "phalanx.benchmark/1"


@dataclass(frozen=True)
class Judged:
    """A number with a target: at most ``limit``, or at least."""

    value: float | None
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


Cell = float | str | Judged | None


@dataclass(frozen=True)
class Column:
    """A column of a sheet."""

    heading: str
    unit: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a sheet; without cells it is the heading of those that follow."""

    label: str
    cells: tuple[Cell, ...] = ()
    ours: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table of the report; its rows have a label and a cell for each column."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def as_table(self, *, aims: bool = False) -> Table:
        """Return it for the terminal; with ``aims``, each target is marked as met or missed."""
        table = Table(
            title=f"\n{self.title}",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=0,  # the widest tables just fit into 80 columns
            show_edge=False,
        )
        table.add_column("", no_wrap=True)
        for column in self.columns:
            heading = f"{column.heading}\n{column.unit}" if column.unit else column.heading
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            if not row.cells:
                table.add_section()
            style = "italic" if not row.cells else "bold" if row.ours else ""
            cells = [_shown(cell if aims else _plain(cell)) for cell in row.cells]
            table.add_row(row.label, *cells, style=style)
        return table


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one benchmark has shown.

    Args:
        name: Of the benchmark, and of the files.
        command: The line that measures it again.
        measured: Every number as it was taken, as JSON has it.
        failures: By contestant, why it fell out.
        aims: A table of nothing but targets.
    """

    name: str
    title: str
    command: str
    machine: Machine
    sheets: tuple[Sheet, ...]
    panels: tuple[Panel, ...]
    measured: Mapping[str, Any]  # Any: JSON
    failures: Mapping[str, str] = field(default_factory=dict)
    aims: Sheet | None = None

    @property
    def all_sheets(self) -> tuple[Sheet, ...]:
        """The tables, the one of targets last."""
        return self.sheets if self.aims is None else (*self.sheets, self.aims)

    def as_json(self) -> str:
        """Return everything but the figure."""
        record = {
            "schema": SCHEMA,
            "benchmark": self.name,
            "title": self.title,
            "command": self.command,
            "machine": asdict(self.machine),
            "tables": [_sheet_record(sheet) for sheet in self.sheets],
            "targets": [
                {
                    "table": sheet.title,
                    "row": row.label,
                    "column": column.heading,
                    **asdict(cell),
                    "met": cell.met,
                }
                for sheet in self.all_sheets
                for row in sheet.rows
                for column, cell in zip(sheet.columns, row.cells, strict=bool(row.cells))
                if isinstance(cell, Judged)
            ],
            "failures": {name: headline(cause) for name, cause in self.failures.items()},
            "measured": self.measured,
        }
        return json.dumps(record, indent=1, ensure_ascii=False) + "\n"

    def draw(self, path: Path) -> None:
        """Write the figure, as PNG."""
        draw(self.panels, self.title, self.machine.in_words(), path)


def publish(
    report: Report,
    console: Console,
    out: Path,
    *,
    aims: bool = False,
    excused: Collection[str] = (),
) -> None:
    """Print the tables and write both files.

    Args:
        aims: Whether targets are shown.
        excused: Contestants whose failure is no error.

    Raises:
        typer.Exit: A contestant failed, code 1.
    """
    for sheet in report.all_sheets if aims else report.sheets:
        console.print(sheet.as_table(aims=aims))
    for name, cause in report.failures.items():
        console.print(f"{name} failed.", style="red")
        console.print(cause)
    out.mkdir(parents=True, exist_ok=True)
    record, figure = out / f"{report.name}.json", out / f"{report.name}.png"
    record.write_text(report.as_json(), encoding="utf-8")
    report.draw(figure)
    console.print(f"Wrote {record} and {figure}.")
    if set(report.failures) - set(excused):
        raise typer.Exit(1)


def number(value: float) -> str:
    """Return a number with about three significant digits.

    Example:
        >>> [number(value) for value in (12345.6, 12.345, 1.2345, 0.012345, 0.0)]
        ['12,346', '12.3', '1.23', '0.012', '0.00']
    """
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def headline(cause: str) -> str:
    """Return the first line: a program's last words are of the machine that it ran on.

    Example:
        >>> headline("It ended.\\nProcess 0 said last:\\nTraceback …")
        'It ended.'
    """
    return cause.partition("\n")[0]


def _shown(cell: Cell) -> Text:
    if cell is None:
        return Text("–")
    if isinstance(cell, str):
        return Text(cell)
    if not isinstance(cell, Judged):
        return Text(number(cell))
    if cell.value is None:
        return Text("–")
    bound, mark = "≥" if cell.at_least else "≤", "✓" if cell.met else "✗"
    words = f"{number(cell.value)} {bound}{number(cell.limit)} {mark}"
    return Text(words, style="green" if cell.met else "red")


# Any: the values of JSON objects are of all kinds.
def _sheet_record(sheet: Sheet) -> Mapping[str, Any]:
    return {
        "title": sheet.title,
        "columns": [asdict(column) for column in sheet.columns],
        "rows": [{"label": row.label, "cells": [_plain(cell) for cell in row.cells]}
                 for row in sheet.rows],
    }  # fmt: skip


def _plain(cell: Cell) -> float | str | None:
    return cell.value if isinstance(cell, Judged) else cell
