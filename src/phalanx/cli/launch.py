"""``phalanx launch``: run a script as the ranks of a job; ``phalanx secret`` for their tables."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import make_console


def launch(
    script: Annotated[Path, typer.Argument(help="A Python file.", exists=True, dir_okay=False)],
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="Ranks on this host.", show_default="one a core"),
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    endpoint: Annotated[
        str, typer.Option(help="HOST:PORT where several hosts meet, the same on all.")
    ] = "",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of all ranks after one has failed.")
    ] = 0,
    rank_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often to restart each rank by itself while the others continue: for elastic "
            "ranks, `Ranks()`.",
        ),
    ] = 0,
) -> None:
    """Run a script in several ranks, as torchrun does, with defaults for CPUs.

    `init_process_group()` without a backend takes `phalanx` for the CPU; each rank has the cores
    divided by the ranks as threads, unless OMP_NUM_THREADS says otherwise. If several
    ranks fail, the root cause is printed last, and its exit code is the command's.
    """
    # Late, as it needs torch, which takes seconds: `--help` does without.
    from phalanx.launching import RankFailed, launch_script
    from phalanx.replicas import num_cores

    console = make_console(stderr=True)
    if endpoint:
        console.print(f"{nnodes} hosts meet at {endpoint}")
    try:
        launch_script(
            script,
            args or [],
            num_cores() if ranks is None else ranks,
            nodes=nnodes,
            endpoint=endpoint,
            max_restarts=max_restarts,
            rank_restarts=rank_restarts,
        )
    except RankFailed as exc:
        console.print(str(exc), style="bold red")
        raise typer.Exit(exc.exit_code) from None
    except KeyboardInterrupt:
        console.print("Interrupted: all ranks of this host were ended.")
        raise


def secret(
    path: Annotated[Path, typer.Argument(help="The new file; it must not exist.")],
) -> None:
    """Make a secret for tables on several hosts, in a file that only you can read.

    The program `openssl` makes it, so it must be installed here; other hosts need only the file.
    Bring the same file to every host, by a way that is private, and name it there in
    PHALANX_SECRET_FILE.
    """
    from phalanx import cluster  # late, as above

    path = path.absolute()  # scripts may change their folder
    cluster.make_secret(path)
    make_console().print(
        f"Made {path}. Bring it to every host (scp keeps it between you and the host), and say "
        f"there: export PHALANX_SECRET_FILE={shlex.quote(str(path))}"
    )
