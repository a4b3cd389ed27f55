"""``make bench-hosts``: tables between hosts, beside torch RPC, a Ray actor and a TCP socket.

One machine plays two hosts, so a network costs nothing here but what the kernel does. All
contestants are set up, then take turns at one task after the other (see `turns`): first with one
client, then, in new processes, with many.
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Aims, Out, begin, command_line, progress, read_names
from benchmarks.host_contestants import CONTESTANTS, SECRET, HostsJob, commands_of
from benchmarks.host_report import report_hosts
from benchmarks.host_tasks import TASKS, TASKS_OF_ALL, TASKS_OF_ONE
from benchmarks.old_report import publish
from benchmarks.table_peers import is_there
from benchmarks.table_report import Seconds
from benchmarks.turns import compete_at
from phalanx.cluster import make_secret

_TURN_S = 0.2
_ADDING = ("phalanx", "encrypted", "rpc", "ray")


def hosts(
    contestants: Annotated[
        str | None,
        typer.Option(help=f"Only these: {', '.join(CONTESTANTS)}.", show_default="all"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant at each task.")] = 8,
    rows: Annotated[int, typer.Option(min=2, help="Rows of the matrix.")] = 1_000_000,
    clients: Annotated[int, typer.Option(min=1, help="Clients that add at once.")] = 8,
    out: Out = Path("out/bench-hosts"),
    aims: Aims = False,
) -> None:
    """Time get and add of another host's rows, beside torch RPC, a Ray actor and a TCP socket.

    One machine plays both hosts. A contestant that failed is an error: exit code 1.
    """
    names = list(CONTESTANTS)
    if contestants is not None:
        names = read_names("contestants", contestants, CONTESTANTS)
    console, machine = begin()
    if "ray" in names and not is_there("ray"):
        names.remove("ray")
        console.print("Ray is not installed, so it is left out: pip install --group peers.")
    out.mkdir(parents=True, exist_ok=True)
    adding = [name for name in names if name in _ADDING]
    num_turns = rounds * (len(names) * len(TASKS_OF_ONE) + len(adding) * len(TASKS_OF_ALL))
    seconds: Seconds = {}
    floods: Seconds = {}
    failures: dict[str, str] = {}
    with (
        progress(console, num_turns, f"{', '.join(names)}: {rounds} rounds") as show,
        tempfile.TemporaryDirectory(dir=out) as folder,
    ):
        for some, tasks, num_clients, found in (
            (names, TASKS_OF_ONE, 1, seconds),
            (adding, TASKS_OF_ALL, clients, floods),
        ):
            place = Path(folder).resolve() / f"clients-{num_clients}-of-{len(tasks)}"
            place.mkdir()
            make_secret(place / SECRET)
            commands = {
                name: commands_of(
                    HostsJob(
                        contestant=name,
                        rows=rows,
                        num_clients=num_clients,
                        folder=str(place),
                        turn_s=_TURN_S,
                        port=_free_port(),
                    )
                )
                for name in some
            }
            numbers = {task: TASKS.index(task) for task in tasks}
            compete_at(numbers, commands, rounds, found, failures, show)
    for name, by_task in floods.items():
        seconds.setdefault(name, {}).update(by_task)
    report = report_hosts(
        seconds,
        failures,
        machine,
        command_line(
            "hosts", contestants=",".join(names), rounds=rounds, rows=rows, clients=clients
        ),
        rows=rows,
        clients=clients,
        rounds=rounds,
    )
    publish(report, console, out, aims=aims)


def _free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
