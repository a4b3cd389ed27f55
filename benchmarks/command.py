"""What the commands of all benchmarks have in common: options, the first lines, a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import Machine, describe_machine
from phalanx.cli.console import make_console
from phalanx.errors import ConfigError

BUSY_LOAD = 0.5

Out = Annotated[
    Path, typer.Option(help="Folder for the JSON file and the figure; older ones are replaced.")
]
Model = Annotated[str, typer.Option(help="Which model: mlp, cnn or gpt.")]
Aims = Annotated[bool, typer.Option("--aims", hidden=True)]  # also show targets, for developers


def read_counts(option: str, text: str, *, least: int) -> list[int]:
    """Read whole numbers, separated by commas; return each once, in their order.

    Example:
        >>> read_counts("ranks", "4, 2,2", least=2)
        [2, 4]
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(
            f"`--{option}` must be whole numbers from {least} on, separated by commas, but is "
            f"{text!r}."
        )
    return sorted({int(word) for word in words})


def read_names(option: str, text: str, known: Collection[str]) -> list[str]:
    """Read names, separated by commas; return each once, in the order given."""
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names or not set(names) <= set(known):
        raise ConfigError(
            f"`--{option}` must name some of {', '.join(known)}, separated by commas, but is "
            f"{text!r}."
        )
    return names


def command_line(name: str, **options: object) -> str:
    """Return the line that runs a benchmark with these options.

    Example:
        >>> command_line("tables", snapshot_mb=4)
        'python -m benchmarks tables --snapshot-mb=4'
    """
    words = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    return " ".join(["python -m benchmarks", name, *words])


def begin() -> tuple[Console, Machine]:
    """Say on what is measured."""
    console, machine = make_console(), describe_machine()
    console.print(machine.in_words())
    if machine.load is not None and machine.load > BUSY_LOAD:
        console.print(
            f"This machine had other work in the last minute (load {machine.load:.1f}); if it "
            "still has, that will show in the numbers.",
            style="yellow",
        )
    return console, machine


@contextlib.contextmanager
def progress(console: Console, num_turns: int, what: str) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal; elsewhere a line, since one per turn would bury the tables.

    The bar is drawn between turns only: a thread that redraws it would take time from the
    contestant that is being measured.
    """
    if not console.is_terminal:
        console.print(what)
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=num_turns)
        begun = 0

        def show(doing: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=doing, refresh=True)
            begun += 1

        yield show
