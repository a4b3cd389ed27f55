"""Faults that worker processes commit on order, each exactly once.

An order is a file; the worker that it is for looks for it at every point that it passes:

    order-1      "before reply|kill|2"       worker 1 dies at the 2nd passing of that point
    fired-1      the monotonic time          written, and the order removed, just before the deed

So one training serves many faults: a replacement has no order, and whoever gave the order can tell
from the files whether it was carried out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

POINTS = (  # passed by a worker process, in the order of a step
    "born",  # it has all it needs, and has not said so yet
    "microbatch taken",
    "before forward",
    "after backward",
    "gradients half written",
    "gradients written",
    "before reply",
)
MODULE_POINTS = ("inside forward", "inside backward")  # passed by the module of `course`

_MARGIN_BYTES = 32 << 20
_TOO_MUCH_BYTES = 1 << 36


def _die_of(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.pause()  # until it is delivered


def _segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _run_out_of_memory() -> None:
    """Ask for more memory than the process may have, while a limit holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MARGIN_BYTES, hard))
    try:
        bytearray(_TOO_MUCH_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _run_out_of_memory_and_die() -> None:
    """As most programs do: without memory for the message either."""
    try:
        _run_out_of_memory()
    except MemoryError:
        os.abort()


def _spin() -> None:
    while True:
        pass


DEEDS = {
    "kill": lambda: _die_of(signal.SIGKILL),
    "terminate": lambda: _die_of(signal.SIGTERM),
    "segfault": _segfault,
    "exit": lambda: os._exit(3),
    "memory and die": _run_out_of_memory_and_die,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: threading.Event().wait(),
    "spin": _spin,  # without ever giving the interpreter's lock away for good
    "memory": _run_out_of_memory,  # raises MemoryError
    "leave": lambda: sys.exit(5),  # raises SystemExit
}

REASONS = {  # what a `WorkerLost` says of it
    "kill": "SIGKILL",
    "terminate": "SIGTERM",
    "segfault": "SIGSEGV",
    "exit": "exited with code 3",
    "memory and die": "SIGABRT",
    "stop": "gave no answer",
    "hang": "gave no answer",
    "spin": "gave no answer",
}


@dataclass(frozen=True)
class Order:
    """``deed`` at the ``passing``-th time, from now on, that the worker comes by ``point``."""

    point: str
    deed: str = "kill"
    passing: int = 1

    def __str__(self) -> str:
        return f"{self.point}|{self.deed}|{self.passing}"

    @classmethod
    def parse(cls, text: str) -> Order:
        point, deed, passing = text.split("|")
        return cls(point, deed, int(passing))


class Saboteur:
    """What is planted in the workers: carries out the orders that lie in ``folder``."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._passed = 0

    def __call__(self, point: str, worker: int) -> None:
        try:
            with open(f"{self._folder}/order-{worker}") as file:
                order = Order.parse(file.read())
        except FileNotFoundError:  # nearly always; and always in the parent, which is worker -1
            self._passed = 0
            return
        if order.point != point:
            return
        self._passed += 1
        if self._passed < order.passing:
            return
        self._passed = 0
        with open(f"{self._folder}/fired-{worker}.new", "w") as file:
            file.write(repr(time.monotonic()))
        os.rename(f"{self._folder}/fired-{worker}.new", f"{self._folder}/fired-{worker}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._folder}/order-{worker}")
        DEEDS[order.deed]()


class Orders:
    """The other end: gives orders and sees what became of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def give(self, worker: int, order: Order) -> None:
        assert order.deed in DEEDS
        assert not (self.folder / f"order-{worker}").exists()
        fresh = self.folder / f"order-{worker}.new"
        fresh.write_text(str(order))
        fresh.rename(self.folder / f"order-{worker}")

    def fired_s(self, worker: int) -> float | None:
        """Return when the worker carried its order out, and forget it; None if it has not yet."""
        try:
            text = (self.folder / f"fired-{worker}").read_text()
        except FileNotFoundError:
            return None
        (self.folder / f"fired-{worker}").unlink()
        return float(text)

    def withdraw(self) -> None:
        """Take all orders back."""
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)
