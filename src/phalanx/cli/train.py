"""``phalanx train`` and ``phalanx resume``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from phalanx.cli.console import INTERRUPTED, make_console
from phalanx.errors import ConfigError


def _option(metavar: str, help: str, **settings: Any) -> Any:  # Any: as typer.Option
    return typer.Option(metavar=metavar, help=help, **settings)


_DATA_HELP = (
    "A CSV, TSV, NPZ or NPY file, a text, a folder of pictures with a subfolder for each class, "
    "a folder saved by `datasets`, digits (Phalanx brings them), or module:attribute."
)
Executor = Annotated[
    Literal["threads", "processes", "inline"],
    typer.Option(
        help="threads of this process; processes, which may be killed without loss; or inline, one "
        "replica in the main thread."
    ),
]
Replicas = Annotated[
    str,
    _option("auto|N|DEVICES", "A number, or a device for each, as cpu,cuda:0. auto: every core."),
]
DoesTrace = Annotated[
    bool, typer.Option("--trace", help="Also write trace.json, for ui.perfetto.dev.")
]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, as runs/digits-cnn-001.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Import code named by a run folder that other users can write to."
    ),
]


def train(
    data: Annotated[str, typer.Argument(metavar="DATA", help=_DATA_HELP)],
    *,
    model: Annotated[
        str,
        _option(
            "MODEL", "mlp, cnn, gpt, or module:attribute: an nn.Module. auto: by the form of DATA."
        ),
    ] = "auto",
    target: Annotated[
        str | None, _option("COLUMN", "The column to predict.", show_default="the last one")
    ] = None,
    task: Annotated[
        Literal["auto", "classify", "regress"],
        typer.Option(help="auto: words and few different whole numbers are classes."),
    ] = "auto",
    loss: Annotated[
        str,
        _option(
            "LOSS",
            "cross_entropy, mse, l1, bce (of logits), or module:attribute: a function of outputs "
            "and targets. auto: by the task.",
        ),
    ] = "auto",
    validation: Annotated[
        str, _option("SHARE|DATA", "The share of the rows that is kept apart, or other data.")
    ] = "0.1",
    epochs: Annotated[int, _option("N", "Passes over the data.", min=1)] = 10,
    batch_size: Annotated[int, _option("N", "Rows in a step.", min=1)] = 64,
    lr: Annotated[float, _option("RATE", "AdamW's learning rate in the first step.", min=0)] = 2e-3,
    schedule: Annotated[
        Literal["linear", "cosine", "constant"],
        typer.Option(help="The learning rate falls to 0 in the last epoch, or is constant."),
    ] = "linear",
    clip_norm: Annotated[
        float | None,
        _option("NORM", "The largest norm of the gradients.", show_default="unlimited"),
    ] = None,
    early_stopping: Annotated[
        int | None,
        _option(
            "N",
            "Stop after N epochs without a better loss; keep the best epoch's weights.",
            min=1,
            show_default="never",
        ),
    ] = None,
    every_steps: Annotated[
        int | None,
        _option(
            "N", "Save every N steps, too.", min=1, show_default="after each epoch and at a stop"
        ),
    ] = None,
    replicas: Replicas = "auto",
    executor: Executor = "threads",
    microbatches: Annotated[
        int,
        _option(
            "M",
            "Cut each batch into M pieces: the weights are then bitwise identical for any number "
            "of replicas. 0: one piece for each replica.",
            min=0,
        ),
    ] = 4,
    seed: Annotated[
        int, _option("N", "Seed of initial weights, order of the data and dropout.", min=0)
    ] = 0,
    trace: DoesTrace = False,
    out: Annotated[
        Path | None,
        _option("DIR", "The run folder, new or empty.", show_default="runs/DATA-MODEL-NNN"),
    ] = None,
) -> None:
    """Train a model on data, and leave weights, metrics and curves in a run folder.

    Ctrl-C finishes the step, saves, and prints the command that continues.
    """
    given = dict(locals())
    # Late, as it needs torch, which takes seconds: `--help` does without.
    from phalanx.cli.training_run import Options, TrainingRun

    options = Options(**{each.name: given[each.name] for each in fields(Options)})
    run, opened = TrainingRun.begin(options, out)
    if not run.train(opened, make_console(), trace=trace):
        raise typer.Exit(INTERRUPTED)


def resume(
    run: RunPath,
    *,
    data: Annotated[
        str | None, _option("DATA", "The data, if it was moved.", show_default="unchanged")
    ] = None,
    epochs: Annotated[
        int | None, _option("N", "Passes since the run's beginning.", show_default="unchanged")
    ] = None,
    replicas: Annotated[Replicas | None, _option("auto|N|DEVICES", "As for train.")] = None,
    executor: Executor | None = None,
    trace: DoesTrace = False,
    trust: Trust = False,
) -> None:
    """Continue a run from its last checkpoint.

    With the same number of epochs the weights are bitwise those of an unbroken run.
    """
    # Late, as above.
    from phalanx.cli.data import open_data
    from phalanx.cli.training_run import TrainingRun

    given = {"data": data, "epochs": epochs, "replicas": replicas, "executor": executor}
    changed = {name: value for name, value in given.items() if value is not None}
    opened = TrainingRun.open(run, trust=trust, **changed)
    place = Path(opened.options.data)
    if data is None and place.is_absolute() and not place.exists():
        raise ConfigError(
            f"The run's data must be where it was, but {place} does not exist. Say where it is "
            "now: --data DATA."
        )
    rows = open_data(opened.options.data, schema=opened.schema)
    if not opened.train(rows, make_console(), trace=trace):
        raise typer.Exit(INTERRUPTED)
