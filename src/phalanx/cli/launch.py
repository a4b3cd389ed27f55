"""``phalanx launch``: run a script as the ranks of a job; ``phalanx secret`` for their tables."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import make_console
from phalanx.errors import ConfigError

_SECRET_FILE = "PHALANX_SECRET_FILE"  # `tables.join` reads it, which needs torch to be imported
_WAIT_FOR_HOSTS_S, _WAIT_ON_RAY_S = 600.0, 60.0


def launch(
    script: Annotated[Path, typer.Argument(help="A Python file.")],
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
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep each rank's output in files there, too.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="For tables on several hosts: what `phalanx secret` made.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Let Ray place the ranks; needs `phalanx[ray]`.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="With --ray: the cluster's address.",
            show_default="the one here, or a new one here alone",
        ),
    ] = None,
    cpus_per_worker: Annotated[
        int, typer.Option(min=1, help="With --ray: CPUs, and threads, of each rank.")
    ] = 1,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds that hosts wait for each other, or for room on Ray.",
            show_default="600, or 60 with --ray",
        ),
    ] = None,
) -> None:
    """Run a script in several ranks, as torchrun does, with defaults for CPUs.

    `init_process_group()` without a backend takes `phalanx` for the CPU; each rank has the cores
    divided by the ranks as threads, unless OMP_NUM_THREADS says otherwise. If several
    ranks fail, the root cause is printed last, and its exit code is the command's.
    """
    of_hosts = {
        "--nnodes": nnodes != 1,
        "--endpoint": endpoint,
        "--log-dir": log_dir,
        "--rank-restarts": rank_restarts,
        "--secret-file": secret_file,
    }
    of_ray = {"--address": address, "--cpus-per-worker": cpus_per_worker != 1}
    for name, is_given in (of_hosts if ray else of_ray).items():
        if is_given:
            raise ConfigError(
                f"`{name}` must be left out {'with' if ray else 'without'} `--ray`, but is given."
            )
    # Late, as it needs torch, which takes seconds: `--help` does without.
    from phalanx import cluster
    from phalanx.launching import Job, RankFailed, launch_script, on_ray, run_script
    from phalanx.replicas import num_cores

    console = make_console(stderr=True)
    colour = console.is_terminal and not console.no_color
    try:
        if ray:
            on_ray(
                run_script,
                ranks,
                args=(str(script.resolve()), args or []),
                cpus_per_worker=cpus_per_worker,
                address=address,
                max_restarts=max_restarts,
                timeout_s=_WAIT_ON_RAY_S if timeout_s is None else timeout_s,
            )
            return
        secret = secret_file or os.environ.get(_SECRET_FILE)
        if secret:
            cluster.Secret.read(Path(secret))  # before any rank starts
            os.environ[_SECRET_FILE] = str(Path(secret).absolute())  # scripts change their folder
        job = Job(
            ranks=num_cores() if ranks is None else ranks,
            nodes=nnodes,
            endpoint=endpoint,
            max_restarts=max_restarts,
            rank_restarts=rank_restarts,
            log_dir=log_dir,
            colour=colour,
            timeout_s=_WAIT_FOR_HOSTS_S if timeout_s is None else timeout_s,
        )
        if not job.is_alone:
            console.print(f"{nnodes} hosts meet at {endpoint}")
        launch_script(script, args or [], job)
    except RankFailed as exc:
        console.print("\n".join([str(exc), *getattr(exc, "__notes__", ())]), style="bold red")
        raise typer.Exit(exc.exit_code) from None


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
        f"there: export {_SECRET_FILE}={shlex.quote(str(path))}"
    )
