"""``make bench-tables``: tables beside torch RPC, a Ray actor and torch's own kernels.

All contestants are set up, then take turns at one task after the other, in another order each
round (see `arena`). Snapshots come last, for they want the memory and the disk for themselves.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.arena import Arena
from benchmarks.machine import describe_machine
from benchmarks.report import command_line, publish
from benchmarks.step import introduce, turn_progress
from benchmarks.table_contestants import CONTESTANTS, TablesJob, entrant, is_there
from benchmarks.table_report import report_tables, summarize
from benchmarks.table_tasks import COLS, TASKS, TASKS_OF_DISK, TASKS_OF_MEMORY, TableTask
from phalanx.cli.console import make_console
from phalanx.errors import ConfigError, PeerError
from phalanx.memory import is_compiled

__all__ = ["tables"]

DEFAULT_OUT = Path("out/bench-tables")
_DISK_ROUNDS = 3
_TURN_S = 0.1
_PATIENCE_S = 180.0

Seconds = dict[str, dict[TableTask, list[list[float]]]]


def tables(
    contestants: Annotated[
        str | None,
        typer.Option(help=f"Only these: {', '.join(CONTESTANTS)}.", show_default="all"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant at each task.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the matrix.")] = 1_000_000,
    snapshot_mb: Annotated[
        int, typer.Option(min=1, help="MB of the table of which snapshots are taken.")
    ] = 1_000,
    out: Annotated[
        Path,
        typer.Option(help="Folder for tables.json and tables.png; older ones are replaced."),
    ] = DEFAULT_OUT,
) -> None:
    """Time get and add of rows: tables beside torch RPC, a Ray actor and torch's own kernels.

    Contestants take turns in one run, each in processes of its own. A missed target is marked and
    is no error; a contestant that failed is: exit code 1.
    """
    names = _names(contestants)
    console = make_console()
    machine = describe_machine()
    introduce(console, machine)
    by = "rows.c" if is_compiled() else "torch, since rows.c is not compiled"
    console.print(f"Tables' rows are copied and added to by {by}.")
    if "ray" in names and not is_there("ray"):
        names.remove("ray")
        console.print("Ray is not installed, so it is left out: pip install 'phalanx[peers]'.")
    if not console.is_terminal:
        console.print(f"{', '.join(names)}: {rounds} rounds")
    out.mkdir(parents=True, exist_ok=True)
    snapshot_rows = snapshot_mb * 10**6 // (4 * COLS)
    seconds: Seconds = {}
    failures: dict[str, str] = {}
    in_memory = [name for name in names if name != "snapshot"]
    on_disk = [name for name in names if name == "snapshot"]
    num_turns = len(in_memory) * rounds * len(TASKS_OF_MEMORY)
    num_turns += len(on_disk) * _DISK_ROUNDS * len(TASKS_OF_DISK)
    # Not in the system's own folder for such things, which may be in memory.
    with turn_progress(console, num_turns) as show, tempfile.TemporaryDirectory(dir=out) as folder:
        found = Path(folder).resolve()
        compete(in_memory, found, rows, TASKS_OF_MEMORY, rounds, seconds, failures, show)
        compete(on_disk, found, snapshot_rows, TASKS_OF_DISK, _DISK_ROUNDS, seconds, failures, show)
    command = command_line(
        "tables",
        contestants=",".join(names),
        rounds=rounds,
        rows=rows,
        snapshot_mb=snapshot_mb,
    )
    report = report_tables(
        summarize(seconds),
        failures,
        machine,
        command,
        rows=rows,
        snapshot_bytes=4 * COLS * snapshot_rows,
        rounds=rounds,
        rows_compiled=is_compiled(),
    )
    publish(report, console, out)


def _names(contestants: str | None) -> list[str]:
    if contestants is None:
        return list(CONTESTANTS)
    names = list(dict.fromkeys(name.strip() for name in contestants.split(",") if name.strip()))
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown or not names:
        raise ConfigError(
            f"`--contestants` must name some of {', '.join(CONTESTANTS)}, separated by commas, but "
            f"is {contestants!r}."
        )
    return names


def compete(
    names: Sequence[str],
    folder: Path,
    rows: int,
    tasks: Sequence[TableTask],
    rounds: int,
    seconds: Seconds,
    failures: dict[str, str],
    show: Callable[[str], None],
) -> None:
    """Let contestants take turns, and put down what comes of it; who fails is out."""
    entrants = [
        entrant(TablesJob(contestant=name, rows=rows, folder=str(folder), turn_s=_TURN_S))
        for name in names
    ]

    def attempt(name: str, number: int | None) -> None:
        if name in failures:
            return
        try:
            if number is None:
                arena.greet(name)
                seconds[name] = {task: [] for task in tasks}
            else:
                seconds[name][TASKS[number]].append(arena.run(name, number))
        except PeerError as exc:
            failures[name] = str(exc)
            arena.dismiss(name)

    with Arena(entrants, patience_s=_PATIENCE_S) as arena:
        for name in names:
            attempt(name, None)
        for turn in range(rounds):
            for task in tasks:
                for name in random.Random(turn).sample(names, len(names)):
                    show(f"round {turn + 1} of {rounds} · {task.kind} · {name}")
                    attempt(name, TASKS.index(task))
