"""One worker process, seen from the program that it was forked from."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from phalanx.clock import now_s
from phalanx.execution.mailbox import Mailbox
from phalanx.ipc import (
    die_with_parent,
    flush_output,
    fork,
    let_go,
    signal_main_thread,
    take_signals,
)

Serve = Callable[[Connection, Connection], None]  # with its connection, and what takes its stacks

_DUMP_S = 1.0  # for each piece of a dump
_DUMP_END = b" in _bootstrap\n"  # the outermost frame of the main thread, which is written last
_EXIT_S = 0.03  # for a process to end whose connection has
_LONGEST_MS = 2e9  # 23 days: `poll` counts in 31 bits
_LARGEST_DUMP = 64 << 10
_STANDARD = (1, 2)  # output and errors, which a worker shares with its parent


@dataclass
class Lost(Exception):
    """A worker is gone, or was killed because it did not answer.

    Attributes:
        reason: The exit, signal or silence, for people.
        dump: Where its threads stood, if it hung.
        at_s: When it was noticed.
    """

    reason: str
    dump: str
    at_s: float


class WorkerProcess:
    """A fork of the calling thread, which must outlive it and never have run OpenMP.

    The kernel kills a worker when the thread that forked it ends (see `die_with_parent`). An OpenMP
    team does not survive a fork: the child of a thread that has one waits for it without end.

    Args:
        answers: Its outbox; a worker before it, if any, must be gone.
        serve: Called in the worker.

    Raises:
        OSError: The system starts no process.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, answers: Mailbox, serve: Serve) -> None:
        self.parent_pid = os.getpid()
        self._answers = answers
        self._exit_code: int | None = None
        self._reaping = threading.Lock()
        self._start(serve)
        self._poll = select.poll()  # kept: `multiprocessing.connection.wait` makes one each time
        for source in (self._connection.fileno(), self._sentinel):
            self._poll.register(source, select.POLLIN)

    def _start(self, serve: Serve) -> None:
        with contextlib.ExitStack() as failed:
            self._connection, theirs = Pipe(duplex=True)
            failed.callback(self._connection.close)
            with theirs:
                self._dump, their_dump = Pipe(duplex=False)
                failed.callback(self._dump.close)
                with their_dump:
                    self.pid = _fork(serve, theirs, their_dump)
            self._sentinel = os.pidfd_open(self.pid)
            failed.pop_all()

    def check_alive(self) -> None:
        """Raise an error if it has ended; to be called when nothing was asked of it.

        Raises:
            Lost: It ended.
        """
        if self._poll.poll(0):
            raise self._gone()

    def ask(self, timeout_s: float) -> Any:  # Any: `Done` or `Raised`
        """Let it read the message in its mailbox, and return the answer.

        Raises:
            Lost: It ended, or did not answer in time and was killed.
        """
        try:
            self._connection.send_bytes(b"")
            spoken = dict(self._poll.poll(min(timeout_s * 1e3, _LONGEST_MS)))
            if not spoken:
                raise self._hung(timeout_s)
            if self._connection.fileno() not in spoken:  # a child of its own may hold its end
                raise self._gone()
            self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._gone() from None
        return self._answers.read(copies=True)

    def _gone(self) -> Lost:
        at_s = now_s()
        self.join(_EXIT_S)  # its connection may end before it does, and the exit code is the reason
        return Lost(_exit_reason(self._exit_code), "", at_s)

    def _hung(self, timeout_s: float) -> Lost:
        at_s = now_s()
        dump = self._ask_for_dump()
        self.join()
        return Lost(f"gave no answer for {timeout_s:g} s and was killed", dump, at_s)

    def _ask_for_dump(self) -> str:
        """Let the worker's fault handler write where its threads are, if it still can."""
        with contextlib.suppress(OSError):
            signal_main_thread(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)  # one that was stopped could not write it
        pieces: list[bytes] = []
        while self._dump.poll(_DUMP_S):  # it comes in many small pieces
            piece = os.read(self._dump.fileno(), _LARGEST_DUMP)
            pieces.append(piece)
            ended = not piece or b"".join(pieces).endswith(_DUMP_END)
            if ended or sum(map(len, pieces)) > _LARGEST_DUMP:
                break
        return b"".join(pieces).decode(errors="replace")

    def kill(self) -> None:
        """Kill it, while another thread may wait for its answer: that one joins it."""
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self._sentinel, signal.SIGKILL)

    def join(self, kill_after_s: float = 0.0) -> None:
        """Wait until it has ended, and close its pipes; kill it if it has not after so long."""
        if self._sentinel < 0:
            return
        self._connection.close()
        ended = select.poll()
        ended.register(self._sentinel, select.POLLIN)
        if not ended.poll(kill_after_s * 1e3):
            self.kill()
            ended.poll()
        self._reap()
        self._dump.close()

    def _reap(self) -> None:
        with self._reaping:
            if self._sentinel < 0:
                return
            with contextlib.suppress(ChildProcessError):  # somebody else waits for all children
                _, status = os.waitpid(self.pid, 0)
                self._exit_code = os.waitstatus_to_exitcode(status)
            os.close(self._sentinel)
            self._sentinel = -1


def dismiss_all(workers: list[WorkerProcess | None]) -> None:
    """Kill all of them, and leave None: between two runs they hold nothing that is not here."""
    own = [each for each in workers if each is not None and each.parent_pid == os.getpid()]
    for worker in own:
        worker.kill()
    for worker in own:
        worker.join()
    workers[:] = [None] * len(workers)


def _exit_reason(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    names = {each.value: each.name for each in signal.Signals}  # most real-time signals have none
    name = names.get(-exit_code, f"signal {-exit_code}")
    hint = " (by somebody, or by the kernel for lack of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


# -- the fork --------------------------------------------------------


def _fork(serve: Serve, connection: Connection, dump: Connection) -> int:
    """Return the number of a child that serves, and never returns from here.

    Raises:
        OSError: The system starts no process.
    """
    parent_pid = os.getpid()
    return fork(lambda: _be_worker(serve, connection, dump, parent_pid))


def _be_worker(serve: Serve, connection: Connection, dump: Connection, parent_pid: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent_pid)
        gc.freeze()  # what came with the fork: to look at it would copy its pages
        take_signals()
        let_go({connection.fileno(), dump.fileno(), *_STANDARD})
        serve(connection, dump)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)  # what the program does at its end is the parent's
