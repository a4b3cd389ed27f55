"""``phalanx secret``: make what the hosts of a run share."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import make_console
from phalanx.cluster import make_secret

__all__ = ["secret"]


def secret(
    path: Annotated[Path, typer.Argument(help="Where the file is made; it must not be there yet.")],
) -> None:
    """Make a secret for tables on several hosts, in a file that only you can read.

    The program `openssl` makes it, so it must be installed here; other hosts need only the file.
    Bring the same file to every host, by means that nobody else reads along, and name it there in
    PHALANX_SECRET_FILE.
    """
    path = path.absolute()  # scripts may change their folder
    make_secret(path)
    make_console().print(
        f"Made {path}. Bring it to every host (scp keeps it between you and the host), and say "
        f"there: export PHALANX_SECRET_FILE={shlex.quote(str(path))}",
        soft_wrap=True,
    )
