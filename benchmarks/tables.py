"""``make bench-tables``: tables beside torch RPC, a Ray actor and torch's own kernels.

All contestants are set up, then take turns at one task after the other, in another order each
round (see `turns`). Snapshots come last, for they want the memory and the disk for themselves.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Aims, Out, begin, command_line, progress, read_names
from benchmarks.old_report import publish
from benchmarks.table_contestants import CONTESTANTS, TablesJob, commands_of
from benchmarks.table_peers import is_there
from benchmarks.table_report import Seconds, report_tables
from benchmarks.table_tasks import COLS, TASKS, TASKS_OF_DISK, TASKS_OF_MEMORY
from benchmarks.turns import compete_at

_DISK_ROUNDS = 3
_TURN_S = 0.1


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
    out: Out = Path("out/bench-tables"),
    aims: Aims = False,
) -> None:
    """Time get and add of rows: tables beside torch RPC, a Ray actor and torch's own kernels.

    Contestants take turns in one run, each in processes of its own. One that failed is an error:
    exit code 1.
    """
    names = list(CONTESTANTS)
    if contestants is not None:
        names = read_names("contestants", contestants, CONTESTANTS)
    console, machine = begin()
    if "ray" in names and not is_there("ray"):
        names.remove("ray")
        console.print("Ray is not installed, so it is left out: pip install --group peers.")
    out.mkdir(parents=True, exist_ok=True)
    snapshot_rows = snapshot_mb * 10**6 // (4 * COLS)
    seconds: Seconds = {}
    failures: dict[str, str] = {}
    in_memory = [name for name in names if name != "snapshot"]
    on_disk = [name for name in names if name == "snapshot"]
    num_turns = len(in_memory) * rounds * len(TASKS_OF_MEMORY)
    num_turns += len(on_disk) * _DISK_ROUNDS * len(TASKS_OF_DISK)
    what = f"{', '.join(names)}: {rounds} rounds"
    # Not in the system's own folder for such things, which may be in memory.
    with (
        progress(console, num_turns, what) as show,
        tempfile.TemporaryDirectory(dir=out) as folder,
    ):
        for some, num_rows, tasks, num_rounds in (
            (in_memory, rows, TASKS_OF_MEMORY, rounds),
            (on_disk, snapshot_rows, TASKS_OF_DISK, _DISK_ROUNDS),
        ):
            commands = {
                name: commands_of(
                    TablesJob(
                        contestant=name,
                        rows=num_rows,
                        folder=str(Path(folder).resolve()),
                        turn_s=_TURN_S,
                    )
                )
                for name in some
            }
            numbers = {task: TASKS.index(task) for task in tasks}
            compete_at(numbers, commands, num_rounds, seconds, failures, show)
    command = command_line(
        "tables",
        contestants=",".join(names),
        rounds=rounds,
        rows=rows,
        snapshot_mb=snapshot_mb,
    )
    report = report_tables(
        seconds,
        failures,
        machine,
        command,
        rows=rows,
        snapshot_bytes=4 * COLS * snapshot_rows,
        rounds=rounds,
    )
    publish(report, console, out, aims=aims)
