"""``phalanx train``: the command, and what Ctrl-C does to it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, ClassVar, Self

import typer

from phalanx.cli.console import make_console
from phalanx.cli.options import GivenOptions
from phalanx.cli.session import Session, plan_new, plan_resumed

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C ended


def train(
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="digits (ships with Phalanx), idx:DIR (MNIST-format files), text:PATH (the bytes "
            "of a file or folder), text:stdlib (Python's own source), or module:attribute (your "
            "own Dataset or loader).",
            show_default="digits",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="mlp, cnn, gpt, or module:attribute (your own nn.Module, or what makes it).",
            show_default="cnn; gpt for text",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="cross_entropy (of logits and classes), mse, l1, bce (of logits and numbers from "
            "0 to 1), or module:attribute (your own, of outputs and targets).",
            show_default="cross_entropy",
        ),
    ] = None,
    forward: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE",
            help="Your own function of the model and a microbatch that returns the loss, in the "
            "place of --loss, for batches of any form.",
            show_default="the loss of model(inputs)",
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N|DEVICES",
            help="How many replicas, or one device for each, as cpu,cpu,cuda:0. With auto, a short "
            "trial decides what is fastest here.",
            show_default="auto",
        ),
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option(
            metavar="auto|W,W,...",
            help="Relative shares of the replicas: with 2,1 the first takes two thirds. With auto "
            "they follow the speed that each replica is measured to have.",
            show_default="equal",
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Cut each batch into M pieces whatever the replicas: the trained weights are then "
            "the same bits for any number of them.",
            show_default="one per replica",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Times through the data.", show_default="suits data and model"
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples per step.", show_default="suits data and model"),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="First learning rate of AdamW; it falls to 0 over all epochs. Given anew with "
            "--resume, the rate is what it would be, had the run begun with it.",
            show_default="suits data and model",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Decides initial weights, data order and dropout.", show_default="0"
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Send gradients through fp16, bf16, one_bit, top_k or top_k(FRACTION) before they "
            "are added, with error feedback.",
            show_default="none",
        ),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="EXECUTOR",
            help="threads of this process; processes, which may die without loss; or inline, one "
            "replica in the main thread.",
            show_default="threads",
        ),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long a worker process may take for a microbatch before it counts as hung "
            "and is replaced.",
            show_default="300",
        ),
    ] = None,
    max_failures: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How many worker processes may be lost in all.",
            show_default="20",
        ),
    ] = None,
    memory_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Let worker processes share files in this folder, where memory is short.",
            show_default="memory",
        ),
    ] = None,
    control: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read this file whenever it changes: a line 'replicas 3' goes on with three, "
            "'stop' ends as Ctrl-C does. SIGUSR1 adds a replica, SIGUSR2 takes one away.",
        ),
    ] = None,
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
            help="Go on with the run in this folder, bit for bit, with its own options; "
            "--replicas, --workloads, --epochs and --lr may be given anew.",
        ),
    ] = None,
) -> None:
    """Train a model on replicas, and leave weights, metrics and a figure in a run folder.

    Ctrl-C finishes the step, saves, and says how to go on.
    """
    given = GivenOptions(
        data=data,
        model=model,
        loss=loss,
        forward=forward,
        replicas=replicas,
        workloads=workloads,
        microbatches=microbatches,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        codec=codec,
        executor=executor,
        timeout_s=timeout_s,
        max_failures=max_failures,
        memory_dir=memory_dir,
    )
    job = plan_new(given, out) if resume is None else plan_resumed(given, resume, out)
    job = replace(job, control=control)
    with (
        Session(job, make_console()) as session,
        Interruption(session.stop),
        Growth(session.control.grow),
    ):
        finished = session.run()
    if not finished:
        raise typer.Exit(INTERRUPTED)


class Growth:
    """Turns SIGUSR1 and SIGUSR2 into calls of ``grow(1)`` and ``grow(-1)``."""

    _STEPS: ClassVar = {signal.SIGUSR1: 1, signal.SIGUSR2: -1}

    def __init__(self, grow: Callable[[int], None]) -> None:
        self._grow = grow
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    def __enter__(self) -> Self:
        for number in self._STEPS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._grow(self._STEPS[signal.Signals(number)])


class Interruption:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a call of ``stop``; the next ends the run.

    After the first, the signals have their default effect, which needs no Python to run: it works
    in a step that never ends as well. What was there before is put back on exit. A SIGHUP that is
    ignored, as under `nohup`, stays so.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        # What `signal.signal` returns: a function, a constant, or None for what C code has set.
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self._stop()
