"""The command line of the benchmarks: ``python -m benchmarks step``, or ``all`` of them."""

from __future__ import annotations

import traceback

import typer

from benchmarks.allreduce import allreduce
from benchmarks.ddp import ddp
from benchmarks.hosts import hosts
from benchmarks.memory import memory
from benchmarks.recovery import recovery
from benchmarks.report import OUT, Out
from benchmarks.scaling import scaling
from benchmarks.step import step
from benchmarks.tables import tables
from phalanx.cli.app import main
from phalanx.cli.console import make_console

app = typer.Typer(
    help="Measure Phalanx beside its peers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_ALL = (step, ddp, allreduce, tables, hosts, recovery, memory, scaling)
BENCHMARKS = {command.__name__: command for command in _ALL}
for command in BENCHMARKS.values():
    app.command()(command)


@app.command("all")
def run_all(out: Out = OUT) -> None:
    """Run all benchmarks, one after the other.

    One that fails does not stop the others; the exit code is then 1.
    """
    console, failed = make_console(), []
    for name, benchmark in BENCHMARKS.items():
        console.rule(name)
        try:
            benchmark(out=out)
        except typer.Exit:  # a contestant failed, which the report names
            failed.append(name)
        except Exception:
            failed.append(name)
            console.print(traceback.format_exc(), style="red")
    if failed:
        console.print(f"Failed: {', '.join(failed)}.", style="red")
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app, "python -m benchmarks")
