"""``phalanx report``: the command; the page is made in `report_page.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import make_console
from phalanx.cli.output import written_output


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders of `phalanx train`, or files of `JSONL`."
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The page, written or replaced.")
    ] = Path("report.html"),
) -> None:
    """Write one page of HTML about one or more runs, which needs no other file.

    It has curves, throughput, failures, and the differences between the runs. A run may still
    be under way.
    """
    # Late, as it needs NumPy and Jinja: `--help` does without.
    from phalanx.cli.report_page import make_page, read_run

    page = make_page([read_run(path) for path in runs])
    with written_output(out) as draft:
        draft.write_bytes(page.encode("utf-8", "replace"))  # of file names that are no UTF-8
    runs_told = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    make_console().print(f"Wrote {out}, of {runs_told}: open it in a browser.")
