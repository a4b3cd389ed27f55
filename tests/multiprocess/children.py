"""Processes that a test may kill: each runs one function and talks over a pipe."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.multiprocess.fork_server import context

DEADLINE_S = 60.0


class Child:
    """A process that runs ``function(connection, *args)``; a region may be among ``args``."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = context.Process(target=_run, args=(function, theirs, args), daemon=True)
        self.process.start()
        theirs.close()  # else its end would not be seen as the end of the pipe

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def get(self, deadline_s: float = DEADLINE_S) -> Any:
        """Return what the child sends next; its own traceback if it raised."""
        if not self.connection.poll(deadline_s):
            raise AssertionError(f"child {self.pid} said nothing within {deadline_s:g} s")
        kind, value = self.connection.recv()
        if kind == "raised":
            raise AssertionError(f"child {self.pid} raised:\n{value}")
        return value

    def put(self, value: object = None) -> None:
        self.connection.send(value)

    def kill(self) -> None:
        """Kill it as `kill -9` does, and reap it."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


class Children:
    """Starts children, and ends them when the test is over."""

    def __init__(self) -> None:
        self._started: list[Child] = []

    def start(self, function: Callable[..., Any], *args: object) -> Child:
        child = Child(function, *args)
        self._started.append(child)
        return child

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._started:
            child.end()


class ReusedChildren:
    """Children that run one function after another, as starting one takes longer than most."""

    def __init__(self) -> None:
        self._idle: list[Child] = []

    def run(self, function: Callable[..., Any], calls: Sequence[Sequence[object]]) -> list[Any]:
        """Call ``function(parent, *args)`` for all ``calls`` at once, each in a child of its own.

        Returns:
            What each has told its parent, once; all have returned from the function.

        Raises:
            AssertionError: One raised, died or was late. All are ended then.
        """
        while len(self._idle) < len(calls):
            self._idle.append(Child(_run_one_after_another))
        try:
            for child, args in zip(self._idle, calls, strict=False):
                child.put((function, *args))
            told = [child.get() for child in self._idle[: len(calls)]]
            assert [child.get() for child in self._idle[: len(calls)]] == [None] * len(calls)
        except BaseException:
            self.close()
            raise
        return told

    def close(self) -> None:
        """End them; the next `run` starts others."""
        for child in self._idle:
            child.end()
        self._idle = []


class Parent:
    """The other end: what a child's function talks to."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def tell(self, value: object = None) -> None:
        self.connection.send(("value", value))

    def hear(self, deadline_s: float | None = DEADLINE_S) -> Any:
        """Return what the parent puts next; without a deadline, whose end ends the wait."""
        if not self.connection.poll(deadline_s):
            raise AssertionError("the parent said nothing")
        return self.connection.recv()


def _run(function: Callable[..., Any], connection: Connection, args: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server knew: a test's collects need not go over it
    try:
        function(Parent(connection), *args)
    except BaseException:
        connection.send(("raised", traceback.format_exc()))


def _run_one_after_another(parent: Parent) -> None:
    while True:  # until the parent has gone
        function, *args = parent.hear(deadline_s=None)
        function(parent, *args)
        parent.tell()


def wait_for_exit(pid: int) -> None:
    """Wait until a process that need not be our child has ended, or is only to be reaped."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready = multiprocessing.connection.wait([fd], DEADLINE_S)
    os.close(fd)
    assert ready, f"process {pid} lives on"
