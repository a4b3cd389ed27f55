"""Persistent threads, one per replica, that run one function at a time."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # private, but as old as `signal`
import contextlib
import contextvars
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from phalanx.errors import GroupAborted, StateError
from phalanx.replicas import autocast_off, caller_intra_op, set_intra_op

T = TypeVar("T")
_SIGNALS_HEARD_S = 1.0  # Python runs signal handlers between waits, not inside them
_SIGNALS = (  # those that programs answer, Ctrl-C first; to look at all takes 0.1 ms
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2),
)


class _ThreadState:
    """State shared by the pool and one of its threads, which holds nothing else of the pool.

    Wake-up calls may come twice: what counts are the tickets, so an interrupt between any two
    instructions of the caller can be answered by calling again.
    """

    def __init__(self) -> None:
        self.go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.wanted = 0
        self.finished = 0
        self.closed = False
        self.task: Callable[[], Any] | None = None  # Any: the caller's own result type
        self.result: Any = None
        self.failure: BaseException | None = None


class ThreadPool:
    """Threads that run one function at a time, each with its own index.

    Idle threads sleep; they never spin. A pool that is no longer referenced dismisses its threads
    by itself.

    Args:
        size: Number of threads.
        intra_op: Threads inside the operators that each of them runs.
        name: Threads are called ``<name>-<index>``.

    Attributes:
        closed: Whether the threads were dismissed.

    Example:
        >>> pool = ThreadPool(3, intra_op=1)
        >>> pool.each(lambda index: index * index)
        [0, 1, 4]
        >>> pool.close()
    """

    def __init__(self, size: int, *, intra_op: int, name: str = "phalanx-replica") -> None:
        self._busy = threading.RLock()  # two threads may call one container
        self.closed = False
        self._running = False
        self._closes_afterwards = False
        self._pid = os.getpid()
        self._states = [_ThreadState() for _ in range(size)]
        self._threads = [
            threading.Thread(target=_serve, args=(state,), name=f"{name}-{index}", daemon=True)
            for index, state in enumerate(self._states)
        ]
        # Before the first start: should one fail, or Ctrl-C come, threads go with this object.
        self._dismiss = weakref.finalize(self, _dismiss, self._states)
        for thread in self._threads:
            thread.start()
        before = torch.get_num_threads()
        self.each(lambda _: set_intra_op(intra_op))
        set_intra_op(before)  # the last number set is what threads born later start with

    def each(
        self,
        task: Callable[[int], T],
        *,
        on_interrupt: Callable[[], None] = lambda: None,
        uninterrupted: bool = False,
    ) -> list[T]:
        """Run ``task(index)`` in every thread at once and return the results by index.

        When tasks fail, the first failure by index that is no echo (`GroupAborted`) is raised with
        its own traceback, the others are notes on it. All threads are idle again when this returns
        or raises, also after a `KeyboardInterrupt` in the caller; a second one does not wait, and
        closes the pool, unless the call is ``uninterrupted``.

        Args:
            on_interrupt: Called in the caller's thread before it waits again; it may let the
                tasks end early, as their results are dropped.
            uninterrupted: Wait for the end of all tasks, however often the caller is interrupted.

        Raises:
            StateError: The pool is closed; or a signal's handler calls in the middle of a call; or
                this process is a fork of the one that has the threads.
        """
        if os.getpid() != self._pid:
            raise StateError(
                "Replicas must be used in the process that made them, but this is a fork of it, "
                "without their threads. Make new ones here, or start processes by `spawn`."
            )
        if threading.current_thread() in self._threads:  # it would wait for itself
            raise StateError(
                "Replicas must not be called by the module that they run, but are, from inside its "
                "own forward or backward pass. Call the inner module there."
            )
        with self._busy:
            if self._running:  # the lock lets its own thread in again
                raise StateError(
                    "A call must end before the next begins, but a signal's handler calls in the "
                    "middle of one. Set a flag there, and act on it after the call."
                )
            if self.closed:
                raise StateError("`each()` needs open threads, but they were closed. Make a pool.")
            self._running = True
            try:
                return self._run(task, on_interrupt, uninterrupted)
            finally:
                self._running = False
                if self._closes_afterwards:
                    self._end()

    def _run(
        self, task: Callable[[int], T], on_interrupt: Callable[[], None], uninterrupted: bool
    ) -> list[T]:
        """Start the task in all threads and wait for all; interrupted anywhere, it begins again.

        Beginning again harms nothing: a thread works on each ticket once.
        """
        ticket = self._states[0].finished + 1
        interrupt: BaseException | None = None
        while True:
            try:
                if interrupt is not None:
                    on_interrupt()
                for index, state in enumerate(self._states):
                    # As if the caller's own thread did it: a model may read context variables.
                    state.task = partial(contextvars.copy_context().run, task, index)
                    state.wanted = ticket
                    state.go.put(None)
                for state in self._states:
                    while state.finished != ticket:
                        with contextlib.suppress(queue.Empty):
                            state.done.get(timeout=_SIGNALS_HEARD_S)
                break
            except BaseException as error:  # Ctrl-C: the threads still hold the caller's memory
                if interrupt is not None and not uninterrupted:  # the user insists: a thread hangs
                    self._end()  # and is left behind
                    raise
                interrupt = error
        results = [state.result for state in self._states]
        failures = [state.failure for state in self._states if state.failure is not None]
        for state in self._states:
            state.result = state.failure = state.task = None
        try:
            if interrupt is not None:
                failures.insert(0, interrupt)
            if failures:
                raise _first_cause(failures)
        finally:  # tracebacks hold this frame: a cycle would keep the caller's objects
            del failures, interrupt
        return results

    def _end(self) -> None:
        """Dismiss the threads, and wait for none."""
        self.closed = True
        self._dismiss()

    def close(self) -> None:
        """Dismiss the threads and wait until they are gone; closing twice does nothing.

        While a call is on, it waits for its end; from inside of one (a hook, a signal's handler)
        the call ends first, and this returns at once.
        """
        if os.getpid() != self._pid:  # a fork: the threads are the other process's
            self.closed = True
            self._dismiss.detach()
            return
        if threading.current_thread() in self._threads:
            self._closes_afterwards = True
            return
        with self._busy:
            if self._running:
                self._closes_afterwards = True
                return
            self._end()
        for thread in self._threads:
            thread.join()


class CallerThread:
    """A pool without threads: tasks run in the caller's, one after the other.

    Args:
        devices: Where the tasks compute; each begins without autocast there, as in a thread.
        intra_op: Threads inside the operators.
    """

    def __init__(self, devices: Sequence[torch.device], *, intra_op: int) -> None:
        self._devices = devices
        self._intra_op = intra_op
        self.closed = False

    def each(self, task: Callable[[int], T], *, uninterrupted: bool = False) -> list[T]:
        """Run ``task`` for each index here and now; Ctrl-C and other signals arrive after all.

        In the middle of one they might leave a mode of torch's behind. A second one of a kind does
        not wait, as where threads do the work.

        Args:
            uninterrupted: A second one waits, too.
        """
        held = signals_held(second=uninterrupted)
        with held, autocast_off(self._devices), caller_intra_op(self._intra_op):
            return [task(index) for index in range(len(self._devices))]

    def close(self) -> None:
        """Do nothing more; closing twice does nothing."""
        self.closed = True


class signals_held:
    """Call the handlers of signals that come in the body after it; other threads hold none.

    The module `signal` makes enumerations of all numbers and handlers, which takes ten times as
    long as what is below it.

    Args:
        second: Hold one that comes again, too.
    """

    def __init__(self, numbers: Sequence[int] = _SIGNALS, *, second: bool = True) -> None:
        self._numbers = numbers
        self._second = second
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in self._numbers:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._hold)
        except BaseException:  # a handler's, of a signal that was not held yet
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:  # Any: its class, itself and its traceback, or None
        for each in reversed(self._handlers.items()):  # Ctrl-C last: it may raise at once
            _signal.signal(*each)
        if self._came:
            calls = contextlib.ExitStack()  # one that raises keeps no other from its call
            for number, frame in self._came.items():
                calls.callback(self._handlers[number], number, frame)
            calls.__exit__(*error)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._second or number not in self._came:
            self._came[number] = frame
        else:
            del self._came[number]
            self._handlers[number](number, frame)


def _serve(state: _ThreadState) -> None:
    while True:
        state.go.get()
        if state.closed:
            return
        task, ticket = state.task, state.wanted
        if task is None or ticket == state.finished:
            continue
        try:
            state.result = task()
        except BaseException as error:  # carried to the caller, who raises it
            state.failure = error
        state.task = task = None
        state.finished = ticket
        state.done.put(None)


def _dismiss(states: list[_ThreadState]) -> None:
    for state in states:
        state.closed = True
        state.go.put(None)


def _first_cause(failures: list[BaseException]) -> BaseException:
    cause, *echoes = sorted(failures, key=lambda failure: isinstance(failure, GroupAborted))
    for echo in echoes:
        cause.add_note(f"Also failed: {type(echo).__name__}: {echo}")
    return cause
