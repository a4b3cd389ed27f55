"""Forks of the program: what the child must put aside before it does anything else.

Fork from a thread that has never run OpenMP: an OpenMP team does not survive a fork, and the child
of a thread that has one waits for it without end.

A fork copies file descriptors, and with them the locks that hang on the open file: were they kept,
a lock would outlive its owner's death as long as any forked child (a DataLoader's worker, say)
lives, and parent and child would not exclude each other. So objects let go of theirs in the child.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import stat
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

_HANDLER_S = 5.0  # a thread that logs all the time may take a lock again and again
_OUTPUT = (1, 2)


# Any: objects of any class, each with its method. (A `WeakMethod` whose object dies as the
# interpreter ends may complain on stderr.)
_hooks: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def register_at_fork(hook: Callable[[], None]) -> None:
    """Have ``hook`` called in every process that is forked from this one, while its object lives.

    Args:
        hook: A method that lets go in the child, and leaves the parent's side alone; one of each
            object.
    """
    method = cast(MethodType, hook)
    _hooks[method.__self__] = method.__func__


def _call_hooks() -> None:
    hooks = list(_hooks.items())
    _hooks.clear()  # first: a hook may register itself again, for forks of the child
    for owner, hook in hooks:
        hook(owner)


os.register_at_fork(after_in_child=_call_hooks)


def fork(child: Callable[[], NoReturn]) -> int:
    """Fork, and call ``child`` there; return the child's process number.

    Raises:
        OSError: The system starts no process.
    """
    flush_output()  # else the child would write what waits here once more
    # No handler of the program's may run in the child before `take_signals`.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    handlers = _hold_handlers()
    try:
        pid = _fork_in_silence()
        if pid == 0:
            child()
    finally:
        for lock in handlers:
            lock.release()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def fork_apart(child: Callable[[], object]) -> None:
    """Fork a process that outlives this one and is no child of it, and call ``child`` there.

    It shares output and errors with this process, and nothing else that is open.

    Raises:
        OSError: The system starts no process.
    """

    def begin() -> NoReturn:
        code = 1
        try:
            os.setsid()
            if os.fork() == 0:
                gc.freeze()  # what came with the fork: to look at it would copy its pages
                take_signals()
                let_go(_OUTPUT, files=True)
                child()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            flush_output()
            os._exit(code)  # what the program does at its end is its own

    pid = fork(begin)
    with contextlib.suppress(ChildProcessError):  # somebody else waits for all children
        os.waitpid(pid, 0)


def flush_output() -> None:
    """Write what was printed: nothing of it is written when a fork ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whatever a notebook or a test has put there
            stream.flush()


def _hold_handlers() -> list[Any]:  # Any: reentrant locks, whose class has no name
    """Keep other threads out of the handlers of `logging`.

    Python gives the child new locks for these, but not for the files that they write to.
    """
    found = [reference() for reference in logging._handlerList]  # type: ignore[attr-defined]
    locks = [handler.lock for handler in found if handler is not None and handler.lock]
    return [lock for lock in locks if lock.acquire(timeout=_HANDLER_S)]


def _fork_in_silence() -> int:
    """Fork without Python's warning of threads: ours are idle, the user's are theirs to know of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        return os.fork()


def take_signals() -> None:
    """Put the program's handlers aside; a Ctrl-C is the parent's to answer."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def let_go(kept: Collection[int], *, files: bool = False) -> None:
    """Let go of the program's pipes and sockets: their other ends shall see when it ends.

    Their numbers stay taken, so that no code that still uses one writes to another file. Files stay
    open, unless ``files``.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0, inheritable=False)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it was open for the list alone
            mode = os.fstat(number).st_mode
            is_file = stat.S_ISREG(mode) or stat.S_ISCHR(mode)
            if number not in kept and (files or not is_file):
                os.dup2(null, number, inheritable=False)
