"""``phalanx doctor``: what this machine has, what phalanx would choose, what will not work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.console import make_console

if TYPE_CHECKING:
    from phalanx.cli.diagnosis import Choice, Finding

__all__ = ["doctor"]

_UNWELL = 1
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the same as JSON, for programs.")
    ] = False,
) -> None:
    """Look at this machine: what it has, what phalanx would choose here, and what will not work.

    The exit code is 1 where something that phalanx itself needs will not work, else 0. Nothing is
    sent anywhere.
    """
    console = make_console()
    try:
        # Late, as they need torch, which takes seconds: `--help` does without.
        from phalanx.cli.diagnosis import choose, describe_machine, examine, is_well
        from phalanx.cli.machine import read_machine
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        _show_unimportable(console, error, as_json=as_json)
        raise typer.Exit(_UNWELL) from None
    machine = read_machine()
    choices, findings = choose(machine), examine(machine)
    if as_json:
        told = {
            "well": is_well(findings),
            "machine": asdict(machine),
            "choices": [asdict(each) for each in choices],
            "findings": [asdict(each) for each in findings],
        }
        console.print(json.dumps(told, indent=2))
    else:
        show = _show_tables if console.is_terminal else _show_lines
        show(console, describe_machine(machine), choices, findings)
        console.print(_verdict(findings))
    if not is_well(findings):
        raise typer.Exit(_UNWELL)


def _show_unimportable(console: Console, error: Exception, *, as_json: bool) -> None:
    text = f"torch, or what phalanx needs beside it, cannot be imported: {error}"
    way_out = "Install phalanx again, in an environment of its own: pip install phalanx"
    if as_json:
        finding = {"severity": "error", "topic": "torch", "text": text, "way_out": way_out}
        told = {"well": False, "machine": None, "choices": [], "findings": [finding]}
        console.print(json.dumps(told, indent=2))
    else:
        console.print(f"{text}\n{way_out}")


def _show_tables(
    console: Console,
    facts: Sequence[tuple[str, str]],
    choices: Sequence[Choice],
    findings: Sequence[Finding],
) -> None:
    here = Table("This machine", "")
    for row in facts:
        here.add_row(*row)
    chosen = Table("What phalanx takes", "", "Why")
    for choice in choices:
        chosen.add_row(choice.topic, choice.choice, choice.why)
    tables = [here, chosen]
    if findings:
        found = Table("What to know", "", "Way out")
        for finding in findings:
            topic = Text(finding.topic, _STYLES[finding.severity])
            found.add_row(topic, finding.text, finding.way_out)
        tables.append(found)
    for table in tables:
        console.print(table, soft_wrap=False)


def _show_lines(
    console: Console,
    facts: Sequence[tuple[str, str]],
    choices: Sequence[Choice],
    findings: Sequence[Finding],
) -> None:
    for name, value in facts:
        console.print(f"{name}: {value}")
    for choice in choices:
        console.print(f"{choice.topic} takes: {choice.choice} ({choice.why})")
    for finding in findings:
        way_out = f" Way out: {finding.way_out}" if finding.way_out else ""
        console.print(f"{finding.severity}: {finding.topic}: {finding.text}{way_out}")


def _verdict(findings: Sequence[Finding]) -> str:
    errors, warnings = (
        sum(finding.severity == severity for finding in findings)
        for severity in ("error", "warning")
    )
    if errors:
        return "Something that phalanx needs will not work: see the errors."
    if warnings:
        return "All that phalanx itself needs works; see the warnings for what may not."
    return "All is well."
