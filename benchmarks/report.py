"""The report of every benchmark: tables on the terminal and JSON, with machine and commit."""

from __future__ import annotations

import email.utils
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

import phalanx
from benchmarks.contest import Command, Outcome, T, compete
from phalanx.cli.console import make_console
from phalanx.errors import ConfigError

_BUSY_LOAD = 0.5

Rounds = Annotated[int, typer.Option(min=1, help="Turns of each contestant at each task.")]
Names = Annotated[str, typer.Option(help="Which ones, separated by commas.")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON file; an older one is replaced.")]
OUT = Path("out/bench")
Row = tuple[Any, ...]  # a label, and for each column a number, a string or None


@dataclass(frozen=True)
class Sheet:
    """A table; a row of a label only is a heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]

    def as_table(self) -> Table:
        """Return it for the terminal."""
        table = Table(
            title=f"\n{self.title}", title_justify="left", box=SIMPLE_HEAD, show_edge=False
        )
        table.add_column("", no_wrap=True)
        for heading in self.columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for label, *cells in self.rows:
            table.add_row(label, *map(_shown, cells), style=None if cells else "italic")
        return table


class Run:
    """One run of a benchmark: it prints where it runs, lets contestants compete, and reports.

    Args:
        name: Of the benchmark, and of its JSON file.
        out: The file's folder.

    Attributes:
        sheets: The tables of the report.
        measured: Every number as it was taken, for the JSON file.
        failures: By contestant, why it failed.
    """

    def __init__(self, name: str, out: Path) -> None:
        self.name = name
        self.out = out
        self.console = make_console()
        self.machine = describe_machine()
        self.sheets: list[Sheet] = []
        self.measured: dict[str, Any] = {}  # Any: JSON
        self.failures: dict[str, str] = {}
        self.console.print(" · ".join(f"{key} {value}" for key, value in self.machine.items()))
        if self.machine["load"] > _BUSY_LOAD:
            self.console.print("The machine had other work; that may show.", style="yellow")

    def compete(
        self,
        what: str,
        commands: Mapping[str, Sequence[Command]],
        questions: Mapping[T, int],
        rounds: int,
        *,
        settle: int = 0,
    ) -> Outcome[T]:
        """Let contestants take turns, as `compete` does, and keep their answers under ``what``."""
        outcome = compete(commands, questions, rounds, self._show, settle=settle)
        self.measured[what] = {
            name: {str(task): turns for task, turns in by_task.items()}
            for name, by_task in outcome.answers.items()
        }
        self.failures.update({f"{name}, {what}": why for name, why in outcome.failures.items()})
        return outcome

    def _show(self, doing: str) -> None:
        """Say on a terminal what runs; between turns, as it takes time."""
        if self.console.is_terminal:
            self.console.print(f"{doing:<78}", end="\r")

    def publish(self) -> None:
        """Print the tables, and write the JSON file.

        Raises:
            typer.Exit: A contestant failed, code 1.
        """
        for sheet in self.sheets:
            self.console.print(sheet.as_table())
        for name, cause in self.failures.items():
            self.console.print(f"{name} failed. {cause}", style="red")
        record = {
            "benchmark": self.name,
            "command": f"python -m benchmarks {shlex.join(sys.argv[1:])}",
            "machine": self.machine,
            "tables": [asdict(sheet) for sheet in self.sheets],
            # The first line: the others are of the machine that it ran on.
            "failures": {name: cause.partition("\n")[0] for name, cause in self.failures.items()},
            "measured": self.measured,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / f"{self.name}.json"
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self.console.print(f"Wrote {file}.")
        if self.failures:
            raise typer.Exit(1)


def describe_machine() -> dict[str, Any]:  # Any: JSON
    """Return what must be known to compare numbers with others."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "phalanx": phalanx.__version__,
        "commit": _commit(),
        "date": email.utils.formatdate(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _commit() -> str:
    """Return the commit of the checkout, with ``+`` where files have changed since."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip()
    except OSError:  # no git here
        return ""


def read_names(option: str, text: str, known: Collection[str]) -> list[str]:
    """Read names, separated by commas; return each once, in the order given."""
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names or not set(names) <= set(known):
        raise ConfigError(
            f"`--{option}` must name some of {', '.join(known)}, separated by commas, but is "
            f"{text!r}."
        )
    return names


def ratio(above: float | None, below: float | None) -> float | None:
    """Return a quotient, if both are there."""
    return None if above is None or not below else above / below


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


def _shown(cell: float | str | None) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else number(cell)
