"""``make bench-step``: one training step of three models, Phalanx beside its peers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arena import Pace, compete
from benchmarks.contestants import CONTESTANTS, by_default, entrant, select
from benchmarks.machine import Machine, describe_machine
from benchmarks.report import command_line, publish
from benchmarks.standings import TARGET_WORKERS, TARGETS, rank
from benchmarks.step_report import Result, report_step, title
from phalanx.cli.console import make_console
from phalanx.errors import ConfigError

__all__ = ["introduce", "step", "turn_progress"]

DEFAULT_MODELS = "mlp,cnn,gpt"
DEFAULT_OUT = Path("out/bench-step")
BUSY_LOAD = 0.5


def step(
    models: Annotated[
        str, typer.Option(help="Which models, separated by commas.")
    ] = DEFAULT_MODELS,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps that count, at least, of each contestant.")
    ] = 30,
    out: Annotated[
        Path, typer.Option(help="Folder for step.json and step.png; older ones are replaced.")
    ] = DEFAULT_OUT,
    contestants: Annotated[
        str | None,
        typer.Option(
            help=f"Only these: {', '.join(CONTESTANTS)}.", show_default="all without a codec"
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Replicas, DDP ranks, threads of the multi-thread process."),
    ] = TARGET_WORKERS,
) -> None:
    """Time one training step: Trainer and DataParallel beside DDP and plain PyTorch.

    Contestants take turns in one run, each in processes of its own. A missed target is marked and
    is no error; a contestant that failed is: exit code 1.
    """
    wanted = by_default() if contestants is None else _words(contestants)
    names_by_model = {model: select(wanted, model) for model in _words(models)}
    if not names_by_model:
        raise ConfigError(f"`--models` must name at least one model, but is {models!r}.")

    console = make_console()
    machine, pace = describe_machine(), Pace.for_steps(steps)
    introduce(console, machine)
    if workers != TARGET_WORKERS:
        console.print(f"Targets are for {TARGET_WORKERS} workers, so none is shown for {workers}.")

    results = []
    num_turns = sum(len(names) * (pace.rounds + 2) for names in names_by_model.values())
    with turn_progress(console, num_turns) as show, tempfile.TemporaryDirectory() as folder:
        for model, names in names_by_model.items():
            entrants = [entrant(name, model, workers=workers, folder=folder) for name in names]
            if not console.is_terminal:
                console.print(f"{model}: {len(names)} contestants, {pace.rounds} rounds")

            def on_turn(name: str, doing: str, model: str = model) -> None:
                show(f"{model} · {doing} · {title(name, workers)}")

            outcome = compete(entrants, pace, on_turn)
            targets = [target for target in TARGETS if target.model == model]
            standings = rank(outcome.seconds, targets if workers == TARGET_WORKERS else ())
            result = Result(model=model, workers=workers, outcome=outcome, standings=standings)
            results.append(result)
    command = command_line(
        "step",
        models=",".join(names_by_model),
        steps=steps,
        contestants=",".join(wanted),
        workers=workers,
    )
    publish(report_step(results, machine, pace, command), console, out)


def introduce(console: Console, machine: Machine) -> None:
    """Say on what is measured."""
    console.print(machine.in_words())
    if machine.load is not None and machine.load > BUSY_LOAD:
        console.print(
            f"This machine had other work in the last minute (load {machine.load:.1f}); if it "
            "still has, that will show in the numbers.",
            style="yellow",
        )


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


@contextlib.contextmanager
def turn_progress(console: Console, num_turns: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal; elsewhere nothing, since a line per turn would bury the tables.

    The bar is drawn between turns only: a thread that redraws it would take time from whoever is
    being measured.
    """
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
