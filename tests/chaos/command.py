"""The command line of tests that commit faults by the thousand: ``make chaos``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console

from tests.multiprocess import fork_server

Progress = Callable[[int], None]


def run(soak: Callable[[int, int, Progress], object], *, faults: str, number: int) -> None:
    """Commit so many faults, or what ``--FAULTS`` says, and print the result.

    Args:
        soak: Commits a number of faults, by a seed; tells how many it has committed.
        faults: What they are called.
        number: How many.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{faults}", dest="number", type=int, default=number)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fork_server.start(["phalanx.tables"])  # each import makes a fork slower
    console = Console()
    with console.status(faults) as status:

        def show(n: int) -> None:
            status.update(f"{n:,} of {options.number:,} {faults}")

        result = soak(options.number, options.seed, show)
    console.print(f"{result} (seed {options.seed})")
