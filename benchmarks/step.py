"""``make bench-step``: one training step of three models, Phalanx beside its peers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Aims, Out, begin, command_line, progress, read_names
from benchmarks.contestants import CONTESTANTS, MODELS, by_default, commands_of, select
from benchmarks.report import publish
from benchmarks.step_report import TARGET_WORKERS, Result, report_step, title
from benchmarks.turns import Pace, compete


def step(
    models: Annotated[str, typer.Option(help="Which models, separated by commas.")] = "mlp,cnn,gpt",
    steps: Annotated[
        int, typer.Option(min=1, help="Steps that count, at least, of each contestant.")
    ] = 30,
    out: Out = Path("out/bench-step"),
    contestants: Annotated[
        str | None,
        typer.Option(
            help=f"Only these: {', '.join(CONTESTANTS)}.", show_default="all but ddp-meet"
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Replicas, DDP ranks, threads of the multi-thread process."),
    ] = TARGET_WORKERS,
    aims: Aims = False,
) -> None:
    """Time one training step: Trainer and DataParallel beside DDP and plain PyTorch.

    Contestants take turns in one run, each in processes of its own. One that failed is an error:
    exit code 1.
    """
    wanted = by_default()
    if contestants is not None:
        wanted = read_names("contestants", contestants, CONTESTANTS)
    names_by_model = {
        model: select(wanted, model) for model in read_names("models", models, MODELS)
    }
    pace = Pace.for_steps(steps)
    console, machine = begin()
    if aims and workers != TARGET_WORKERS:
        console.print(f"Targets are for {TARGET_WORKERS} workers, so none is shown for {workers}.")
    results = []
    for model, names in names_by_model.items():
        what = f"{model}: {len(names)} contestants, {pace.rounds} rounds"
        num_turns = len(names) * (pace.rounds + 2)
        with progress(console, num_turns, what) as show, tempfile.TemporaryDirectory() as folder:

            def on_turn(name: str, doing: str, model: str = model) -> None:
                show(f"{model} · {doing} · {title(name, workers)}")

            commands = {
                name: commands_of(name, model, workers=workers, folder=folder) for name in names
            }
            outcome = compete(commands, pace, on_turn)
        results.append(Result(model=model, workers=workers, outcome=outcome))
    command = command_line(
        "step",
        models=",".join(names_by_model),
        steps=steps,
        contestants=",".join(wanted),
        workers=workers,
    )
    publish(report_step(results, machine, pace, command), console, out, aims=aims)
