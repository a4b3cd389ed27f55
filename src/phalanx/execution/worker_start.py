"""Starts a worker as a program of its own.

    this process ── python -c '…main()' descriptors, sys.path ──► worker_main.main
                 ── everything else, over the connection ───────►

Not by `multiprocessing`, whose children import the script that runs, or by a fork, which copies
locks that other threads hold. What a worker needs of the script it is told (see `Definitions`), so
the script runs once, with a guard or without, and need not be a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection

__all__ = ["StartedProcess", "start_worker"]

_MAIN = """
import sys
sys.path[:] = sys.argv[3:]
from phalanx.execution.worker_main import main
main()
"""


class StartedProcess:
    """A process that this one has started, and waits for.

    Attributes:
        pid: Its number.
        sentinel: A descriptor that becomes readable when it ends.
    """

    def __init__(self, started: subprocess.Popen[bytes]) -> None:
        self._started = started
        self.pid = started.pid
        self.sentinel = os.pidfd_open(started.pid)
        self._closing = weakref.finalize(self, os.close, self.sentinel)

    @property
    def exitcode(self) -> int | None:
        """How it ended: the negative number of a signal, or its code; None if it runs."""
        return self._started.poll()

    def kill(self) -> None:
        """End it by force."""
        self._started.kill()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._started.wait(timeout_s)


def start_worker(connection: Connection, dump: Connection) -> StartedProcess:
    """Start a worker with these ends of its connection and of the pipe for its threads' stacks.

    Raises:
        OSError: The system starts no process.
    """
    descriptors = connection.fileno(), dump.fileno()
    options = ["-O"] * sys.flags.optimize + [f"-W{each}" for each in sys.warnoptions]
    words = [*map(str, descriptors), *sys.path]
    # A Ctrl-C is the parent's to answer, also while the worker is still importing.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        started = subprocess.Popen(
            [sys.executable, *options, "-c", _MAIN, *words],
            stdin=subprocess.DEVNULL,
            cwd=os.getcwd(),  # an error here if it is gone; torch would end the worker without one
            pass_fds=descriptors,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return StartedProcess(started)
