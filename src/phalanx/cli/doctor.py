"""``phalanx doctor``: the facts about this machine that phalanx depends on, for a bug report."""

from __future__ import annotations

import typer
from rich.text import Text

from phalanx.cli.console import make_console

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor() -> None:
    """Check this machine: its facts, and the parts of phalanx that will not work on it.

    The exit code is 1 if phalanx itself will not work. Nothing is changed or sent anywhere.
    """
    console = make_console()
    try:
        # Late, because it needs torch, which takes seconds: `--help` does without.
        from phalanx.cli.checks import run_checks
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        console.print(
            f"torch, or a package that phalanx needs, cannot be imported: {error}\n"
            "Install phalanx again, in its own environment: pip install phalanx"
        )
        raise typer.Exit(1) from None
    checks = run_checks()
    for check in checks:
        verdict = (check.verdict, _STYLES[check.verdict])
        advice = f" {check.advice}" if check.advice else ""
        console.print(Text.assemble(verdict, f": {check.topic}: {check.value}.{advice}"))
    if any(check.verdict == "error" for check in checks):
        raise typer.Exit(1)
