"""``phalanx report``: the command; the page is made in `reporting/page.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import make_console
from phalanx.errors import ConfigError
from phalanx.files import written_whole

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders of `phalanx train`, or files of `JSONL`."
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="Where the page goes.")
    ] = Path("report.html"),
) -> None:
    """Write one page of HTML about one or more runs, which needs no other file.

    It has curves, throughput, failures, and the differences between the runs. A run may still
    be under way. An earlier report is replaced, any other file is not.
    """
    # Late, as they need torch, which takes seconds: `--help` does without.
    from phalanx.cli.reporting.page import MARK, make_page
    from phalanx.cli.reporting.runs import read_runs

    _refuse_other_files(out, MARK)
    found = read_runs(runs)
    try:
        with written_whole(out) as draft:
            # "replace": of names of files that are no UTF-8.
            draft.write_bytes(make_page(found).encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(
            f"`--out` must be a file that can be written, but is {str(out)!r}: {error.strerror}. "
            "Name another."
        ) from error
    runs_told = "1 run" if len(found) == 1 else f"{len(found)} runs"
    make_console().print(f"Wrote {out}, of {runs_told}: open it in a browser.")


def _refuse_other_files(out: Path, mark: str) -> None:
    if not out.exists():
        return
    try:
        is_report = out.read_text("utf-8").startswith(mark)
    except (OSError, ValueError):
        is_report = False
    if not is_report:
        raise ConfigError(
            f"`--out` must be a new file or an earlier report, but {str(out)!r} is something else. "
            "Name another."
        )
