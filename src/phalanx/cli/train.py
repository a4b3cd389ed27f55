"""``phalanx train``: the command, and what Ctrl-C does to it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from phalanx.cli.console import make_console
from phalanx.cli.options import Given, takes_options

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C ended


@takes_options
def train(
    given: Given,
    *,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Also write trace.json: what each replica did when, for ui.perfetto.dev.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The run folder, new or empty.",
            show_default="runs/DATA-MODEL-NNN",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Continue the run in this folder, bit for bit, with its own options; "
            "--replicas, --workloads, --epochs, --lr and --executor may be changed. Give "
            "module:attribute again: that is not taken from a folder.",
        ),
    ] = None,
) -> None:
    """Train a model on replicas, and leave weights, metrics and a figure in a run folder.

    Ctrl-C finishes the step, saves, and says how to continue.
    """
    # Late, as it needs torch, which takes seconds: `--help` does without.
    from phalanx.cli.session import Session, plan_new, plan_resumed

    plan = plan_new(given, out) if resume is None else plan_resumed(given, resume, out)
    with (
        Session(replace(plan, trace=trace), make_console()) as session,
        stopped_by_signals(session.stop),
    ):
        finished = session.run()
    if not finished:
        raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a call of ``stop``; the next ends the run.

    After the first, the signals have their default effect, which needs no Python to run: it works
    in a step that never ends as well. A SIGHUP that is ignored, as under `nohup`, stays so.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def receive(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        stop()

    before = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, receive)
        yield
    finally:
        for number, handler in before.items():  # None: C code has set it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
