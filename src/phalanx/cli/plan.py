"""``phalanx plan``: the command; what it measures and predicts is made in other files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.console import make_console
from phalanx.cli.options import Given, complete
from phalanx.errors import ConfigError
from phalanx.files import read_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from phalanx.cli.planning.outcome import Checked
    from phalanx.forecast import StepCosts

__all__ = ["plan", "read_counts", "read_formations"]

_FORMATIONS = "threads,processes,ranks,ddp"
_CHECKED = (1, 2, 4)
_BUSY_LOAD = 0.5
_MOST_BYTES = 1 << 24
_MOST_WORKERS = 100_000  # as `predict` takes


def plan(
    data: Annotated[
        str | None, typer.Option(help="As for `phalanx train`.", show_default="digits")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As for `phalanx train`.", show_default="cnn; gpt for text")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Rows of a microbatch.", show_default="suits data and model"),
    ] = None,
    workers: Annotated[
        str, typer.Option(metavar="N,N,...", help="For how many workers, of one thread each.")
    ] = "1,2,4,8,16,64,256,1024,4096,10000",
    formations: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="threads, processes or ranks of a Trainer, or ddp: DDP over the backend phalanx.",
        ),
    ] = _FORMATIONS,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_WORKERS,
            help="Cut each batch into M microbatches, whatever the workers.",
            show_default="one per worker, so the batch grows with them",
        ),
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Of each host.", show_default="as measured")
    ] = None,
    workers_per_host: Annotated[
        int | None,
        typer.Option(
            min=1, help="When a host is full, the next gets some.", show_default="one per core"
        ),
    ] = None,
    bytes_per_s: Annotated[
        float, typer.Option(help="Bytes per second that a host sends to others, and receives.")
    ] = 1.25e9,
    latency_s: Annotated[
        float, typer.Option(help="Seconds that a message between hosts is under way.")
    ] = 50e-6,
    message_s: Annotated[
        float, typer.Option(help="Seconds that a core is busy with such a message.")
    ] = 20e-6,
    jitter: Annotated[
        float | None,
        typer.Option(
            help="How much a microbatch's seconds vary: the standard deviation of their "
            "logarithm. 0.1: by about a tenth.",
            show_default="as measured",
        ),
    ] = None,
    failures_per_hour: Annotated[
        float, typer.Option(help="How often one process is lost, with its machine or without.")
    ] = 0.0,
    checkpoint_s: Annotated[float, typer.Option(help="Seconds between two checkpoints.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulation.")] = 0,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing: take what `phalanx plan --json` has printed, here or elsewhere.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Also measure 1, 2 and 4 workers here, beside what was predicted."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the same as JSON, for programs.")
    ] = False,
) -> None:
    """Predict what a step takes in each formation, for up to thousands of workers.

    A few steps are measured on this machine, for a minute; then steps and failures are simulated.
    """
    counts, names = read_counts(workers), read_formations(formations)
    given = {"data": data, "model": model, "batch_size": batch_size}
    given = {name: value for name, value in given.items() if value is not None}
    if measured is not None:
        _refuse_what_is_measured({**given, **({"check": True} if check else {})})

    # Late, as they need torch, which takes seconds: `--help` does without.
    from phalanx.cli.planning.outcome import show
    from phalanx.forecast import Cluster, Faults, predict_all, read_costs

    progress = make_console(stderr=True)
    load = os.getloadavg()[0]
    if measured is None and load > _BUSY_LOAD:
        progress.print(
            f"This machine had other work in the last minute (load {load:.1f}). If it still has, "
            "that will show in the numbers: measure it at rest."
        )
    faults = Faults(jitter=jitter, failures_per_hour=failures_per_hour, checkpoint_s=checkpoint_s)
    network = Cluster(
        cores=1,
        workers_per_host=1,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        message_s=message_s,
    )
    if measured is None:
        costs = _measure(given, names, progress)
    else:
        costs = read_costs(_read_measured(measured))
        names = [name for name in names if name in costs.formations]
    cluster = replace(
        network,
        cores=costs.cores if cores is None else cores,
        workers_per_host=workers_per_host or cores or costs.cores,
    )
    predictions = predict_all(
        costs,
        names,
        counts,
        cluster=cluster,
        faults=faults,
        microbatches=microbatches,
        seed=seed,
    )
    checked = _check(given, costs, progress) if check else []
    console = make_console()
    if as_json:
        told = {
            "measured": costs.as_json(),
            "cluster": asdict(cluster),
            "faults": asdict(faults),
            "predictions": [asdict(each) for each in predictions],
            "checked": [asdict(each) for each in checked],
        }
        console.print(json.dumps(told, indent=2))
    else:
        show(console, costs, cluster, faults, predictions, checked)


def read_counts(text: str) -> list[int]:
    """Read ``--workers``; return each number once, in rising order.

    Example:
        >>> read_counts("4, 1,4")
        [1, 4]
    """
    words = [word.strip() for word in text.split(",")]
    are_numbers = all(word.isascii() and word.isdecimal() for word in words)
    if not are_numbers or not all(0 < int(word) <= _MOST_WORKERS for word in words):
        raise ConfigError(
            f"`--workers` must be whole numbers from 1 to {_MOST_WORKERS}, with commas between, "
            f"but is {text!r}."
        )
    return sorted({int(word) for word in words})


def read_formations(text: str) -> list[str]:
    """Read ``--formations``; return each once, in our order.

    Example:
        >>> read_formations("ddp,threads")
        ['threads', 'ddp']
    """
    known = _FORMATIONS.split(",")
    words = {word.strip() for word in text.split(",")}
    if not words <= set(known):
        raise ConfigError(
            f"`--formations` must name some of {', '.join(known)}, with commas between, but is "
            f"{text!r}."
        )
    return [name for name in known if name in words]


def _refuse_what_is_measured(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        raise ConfigError(
            f"`--{name.replace('_', '-')}` must be left out with `--measured`, as nothing is "
            f"measured then, but is {value!r}. Leave out one of them."
        )


def _read_measured(path: Path) -> Any:  # Any: JSON
    try:
        told = json.loads(read_text(path, max_bytes=_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"`--measured` must be a file of JSON, but {str(path)!r} is none: {error}. "
            "Make one: phalanx plan --json > FILE"
        ) from error
    return told.get("measured", told) if isinstance(told, dict) else told


def _measure(given: Given, names: Sequence[str], progress: Console) -> StepCosts:
    from phalanx.cli.planning.hollow import Subject  # late: torch
    from phalanx.cli.planning.measuring import measure  # late: torch

    with progress.status("Measuring") as status:
        return measure(Subject(complete(given)), names, _teller(progress, status))


def _check(given: Given, costs: StepCosts, progress: Console) -> list[Checked]:
    """Measure whole steps, and set them beside what was predicted of this machine."""
    from phalanx.cli.planning.hollow import Subject  # late: torch
    from phalanx.cli.planning.measuring import measure_steps  # late: torch
    from phalanx.cli.planning.outcome import compare  # late: torch

    with progress.status("Checking") as status:
        tell = _teller(progress, status)
        names = list(costs.formations)
        seconds = measure_steps(Subject(complete(given)), names, _CHECKED, ["whole"], tell)
    return compare(costs, seconds)


def _teller(progress: Console, status: Status) -> Callable[[str], None]:
    """Return what shows on a terminal what is measured now; elsewhere nobody looks on."""

    def tell(what: str) -> None:
        if progress.is_terminal:
            status.update(f"Measuring: {what}")

    return tell
