"""The command line of the benchmarks: ``python -m benchmarks step`` or ``make bench-step``.

All of them, on one page: ``python -m benchmarks all`` or ``make bench``.
"""

import typer

from benchmarks.allreduce import allreduce
from benchmarks.gpu import gpu
from benchmarks.hosts import hosts
from benchmarks.memory import memory
from benchmarks.page import measure_all
from benchmarks.recovery import recovery
from benchmarks.step import step
from benchmarks.tables import tables
from phalanx.cli.app import main

app = typer.Typer(
    help="Measure Phalanx beside its peers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
BENCHMARKS = {
    command.__name__: command for command in (step, allreduce, memory, recovery, tables, hosts, gpu)
}
for command in BENCHMARKS.values():
    app.command()(command)
app.command("all")(measure_all(BENCHMARKS))

if __name__ == "__main__":
    main(app, "python -m benchmarks")
