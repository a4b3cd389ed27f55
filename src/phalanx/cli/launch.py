"""``phalanx launch``: run a script as the ranks of a job."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import make_console
from phalanx.errors import ConfigError

__all__ = ["launch"]

# As `tables.join` reads them, whose room needs torch.
_SECRET_FILE = "PHALANX_SECRET_FILE"
_TRUSTED_NETWORK = "PHALANX_TRUSTED_NETWORK"


def launch(
    script: Annotated[Path, typer.Argument(help="A Python file.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="Ranks on this host.", show_default="one a core"),
    ] = None,
    nnodes: Annotated[str, typer.Option(help="Hosts: a number, or FEWEST:MOST.")] = "1",
    endpoint: Annotated[
        str, typer.Option(help="HOST:PORT where several hosts meet, the same on all.")
    ] = "",
    run_id: Annotated[
        str, typer.Option(help="What the hosts of one job have in common.")
    ] = "phalanx",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start all ranks again, so often, after one has failed.")
    ] = 0,
    rank_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Start each rank again by itself, so often, while the others go on: for ranks "
            "that survive the loss of others.",
        ),
    ] = 0,
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep each rank's output in files there, too.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="For tables on several hosts: what `phalanx secret` made.")
    ] = None,
    trusted_network: Annotated[
        bool,
        typer.Option(
            "--trusted-network",
            help="In place of a secret: whoever reaches this job's hosts may change its tables.",
        ),
    ] = False,
) -> None:
    """Run a script in several ranks, as torchrun does, with defaults for CPUs.

    `init_process_group()` without a backend takes `phalanx` for the CPU; each rank has the cores
    divided by the ranks as threads, unless OMP_NUM_THREADS says otherwise. Of several failures the
    first cause is told last, and its exit code is the command's.
    """
    # Late, as it needs torch, which takes seconds: `--help` does without.
    from phalanx.distributed import Job, RankFailed, available_cores, launch_script

    if secret_file is not None:
        os.environ[_SECRET_FILE] = str(secret_file.resolve())
    if trusted_network:
        os.environ[_TRUSTED_NETWORK] = "1"
    console = make_console(stderr=True)
    job = Job(
        ranks=available_cores() if ranks is None else ranks,
        nodes=parse_nodes(nnodes),
        endpoint=endpoint,
        run_id=run_id,
        max_restarts=max_restarts,
        rank_restarts=rank_restarts,
        log_dir=log_dir,
        colour=console.is_terminal and not console.no_color,
    )
    try:
        launch_script(script, args or [], job)
    except RankFailed as exc:
        console.print(str(exc), style="bold red")
        raise typer.Exit(exc.exit_code) from None


def parse_nodes(text: str) -> tuple[int, int]:
    """Read ``2`` or ``1:4``.

    Example:
        >>> parse_nodes("2"), parse_nodes("1:4")
        ((2, 2), (1, 4))
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if found is None:
        raise ConfigError(f"`--nnodes` must be a number or FEWEST:MOST, but is {text!r}.")
    return int(found[1]), int(found[2] or found[1])
