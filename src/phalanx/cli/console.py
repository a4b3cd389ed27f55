"""The terminal: the consoles of the command, and the signals that stop it."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console

INTERRUPTED = 130  # the exit status that a shell gives to a program that Ctrl-C ended


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


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None], console: Console) -> Iterator[threading.Event]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a call of ``stop``; the next ends the process.

    The event is set by the first. After it, the signals have their default effect, which needs no
    Python to run: it works in a step that never ends as well. A SIGHUP that is ignored, as under
    `nohup`, stays so.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    interruption = threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        interruption.set()
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
