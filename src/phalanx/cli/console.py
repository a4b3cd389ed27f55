"""The one place that prints: where every rich console of the command line comes from."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    """Make a console on stdout or stderr.

    Text is printed unchanged, because most of it holds names, paths and commands of the user's: no
    markup, no emoji, no guessed colours, no line broken at the width of the terminal.
    """
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def prepare_stdout() -> None:
    """Let stdout pass on each line at once, and have a ? for what its encoding lacks.

    Python keeps back what goes into a pipe, also lines of ranks, which torch's launcher prints in
    this process. ASCII lacks ×, for one; stderr escapes it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a caller may have put something else there
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
