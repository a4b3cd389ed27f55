"""The signals that stop a training."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from rich.console import Console

INTERRUPTED = 130  # the exit status that a shell gives to a program that Ctrl-C ended


@dataclass
class Interruption:
    """The news of a signal, for the code after `fit`."""

    happened: bool = False


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None], console: Console) -> Iterator[Interruption]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a call of ``stop``; the next ends the process.

    After the first, the signals have their default effect, which needs no Python to run: it works
    in a step that never ends as well. A SIGHUP that is ignored, as under `nohup`, stays so.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    interruption = Interruption()

    def receive(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        interruption.happened = True
        stop()
        # The signal may have come in the middle of a write to the same stream, which then refuses,
        # or because the terminal is gone.
        with contextlib.suppress(RuntimeError, OSError):
            console.print("Finishing the step, then saving. Ctrl-C again stops at once.")

    before = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, receive)
        yield interruption
    finally:
        for number, handler in before.items():  # None: C code has set it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
