"""One worker process, seen from the process that started it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from phalanx.clock import now_s
from phalanx.errors import PeerLost
from phalanx.execution.contract import explain_error
from phalanx.execution.mailbox import Mailbox, collect
from phalanx.execution.timeouts import set_timeouts
from phalanx.execution.worker_main import (
    AddDefinitions,
    Failed,
    ProcessArguments,
    RegionsFollow,
    WorkerInitHandle,
)
from phalanx.execution.worker_start import start_worker
from phalanx.ipc import injected, signal_main_thread
from phalanx.memory import SharedMemoryPool
from phalanx.replicas import load, pack

__all__ = ["START_S", "Lost", "Told", "WorkerProcess"]

START_S = 120.0  # from its start until a worker is ready; importing may take its time
_DUMP_S = 1.0
_DUMP_END = b" in <module>\n"  # the outermost frame of the main thread, which is written last
_GOODBYE_S = 1.0
_EXIT_S = 0.03
_LARGEST_DUMP = 64 << 10


@dataclass
class Lost(Exception):
    """A worker is gone, or was killed because it did not answer.

    Attributes:
        reason: What became of it, for people.
        dump: Where its threads stood, if it hung.
        at_s: When it was noticed.
        exited: Whether it ended by itself, with an exit code.
    """

    reason: str
    dump: str
    at_s: float
    exited: bool


@dataclass
class Told:
    """Which definitions a worker has been sent: the first ``count`` of those that there are."""

    packed: Sequence[bytes]
    count: int


class WorkerProcess:
    """Start a worker; the calling thread must outlive it.

    The kernel kills a worker when the thread that started it ends (see `die_with_parent`).

    Args:
        index: Which one.
        mail: Where its rows and its answers go; nobody else writes there any more.
        intra_op: Threads inside its operators.
        init: What it begins with.
        pool: The executor's.
        told: The definitions that there are, with those of ``init``.

    Raises:
        PeerLost: The system starts no process.

    Attributes:
        version: The version of the module's attributes that it has (see `SourceSync`); -1 for none.
        objects: The version of the `SharedObjects` that it has.
        ready: Whether it has got the model and has said so.
        mailbox: Where rows for it are written.
        answers: Where it writes what is large in its answers.
    """

    def __init__(
        self,
        index: int,
        mail: tuple[Mailbox, Mailbox],
        intra_op: int,
        init: WorkerInitHandle,
        pool: SharedMemoryPool,
        told: Told,
    ) -> None:
        self.index = index
        self.version = -1
        self.objects = 0
        self.ready = False
        self.mailbox, self.answers = mail
        self.parent_pid = os.getpid()
        self._pool = pool
        self._regions = 0
        self._told = told
        self._started_s = now_s()
        self._timeout_s = START_S
        self._has_answered = False
        try:
            self._start(intra_op)
        except OSError as error:
            raise PeerLost(
                f"Worker {index} must be started as a process, but the system says: {error}. Raise "
                "the limits of open files (`ulimit -n`) and processes (`ulimit -u`), see that the "
                "current directory exists, or use executor='threads'.",
                index,
            ) from error
        self._poll = select.poll()  # kept: `multiprocessing.connection.wait` makes one each time
        self._answers_fd = self._connection.fileno()
        for source in (self._answers_fd, self._process.sentinel):
            self._poll.register(source, select.POLLIN)
        with contextlib.suppress(OSError):  # it may be dead already; `poll_ready` finds out
            self._send_regions()
            self._connection.send_bytes(pack(init))

    def _start(self, intra_op: int) -> None:
        self._connection, theirs = Pipe(duplex=True)
        set_timeouts(self._connection, START_S)
        self._dump, their_dump = Pipe(duplex=False)
        try:
            self._process = start_worker(theirs, their_dump)
        finally:
            theirs.close()
            their_dump.close()
        main = vars(sys.modules["__main__"])
        arguments = ProcessArguments(
            worker=self.index,
            parent_pid=self.parent_pid,
            intra_op=intra_op,
            fault=injected(),
            argv=list(sys.argv),
            main={name: main[name] for name in ("__file__", "__package__") if name in main},
        )
        with contextlib.suppress(OSError):  # as below
            self._connection.send_bytes(pack(arguments))

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def poll_ready(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until it is ready.

        Raises:
            Lost: It ended before.
            Exception: What it raised, when it could not take the model over.
        """
        if not self.ready and self._wait(timeout_s):
            answer = self._receive()
            if isinstance(answer, Failed):
                raise rebuilt(answer, f"Raised by worker {self.index} when it was started.")
            self.ready = True
        return self.ready

    def check_alive(self) -> None:
        """See that it is there; to be called when nothing was asked of it.

        Raises:
            Lost: It ended.
        """
        if self._wait(0.0):
            raise self._gone()

    def check_start(self) -> None:
        """See that it does not take longer than `START_S` until it is ready.

        Raises:
            Lost: It did, and was killed.
        """
        if not self.ready and now_s() - self._started_s > START_S:
            raise self._hung(START_S)

    def ask(self, message: bytes, timeout_s: float) -> Any:  # Any: the messages of `worker_main`
        """Send one of them, packed, and return the answer.

        Raises:
            Lost: It ended, or did not answer in time and was killed.
        """
        try:
            if timeout_s != self._timeout_s:
                set_timeouts(self._connection, timeout_s)
                self._timeout_s = timeout_s
            self._send(message)
        except BlockingIOError:  # it does not read
            raise self._hung(timeout_s) from None
        except OSError:
            raise self._gone() from None
        if not self._wait(timeout_s):
            raise self._hung(timeout_s)
        return self._receive()

    def _send(self, message: bytes) -> None:
        self._send_regions()
        told = self._told
        if len(told.packed) > told.count:
            news = tuple(told.packed[told.count :])
            self._connection.send_bytes(pack(AddDefinitions(news)))
            told.count += len(news)
        self._connection.send_bytes(message)

    def _send_regions(self) -> None:
        missing = len(self._pool) - self._regions
        if missing:
            self._connection.send_bytes(pack(RegionsFollow(missing)))
            self._pool.send(self._connection, range(self._regions, self._regions + missing))
            self._regions += missing

    def _wait(self, timeout_s: float) -> bool:
        """Wait until it has spoken or ended; note which."""
        spoken = self._poll.poll(timeout_s * 1e3)
        self._has_answered = any(source == self._answers_fd for source, _ in spoken)
        return bool(spoken)

    def _receive(self) -> Any:
        try:
            if not self._has_answered:  # only the sentinel has spoken
                raise EOFError
            answer = self._connection.recv_bytes()
        except BlockingIOError:  # it has stopped in the middle of its answer
            raise self._hung(self._timeout_s) from None
        except (EOFError, OSError):
            raise self._gone() from None
        return load(answer, lambda token: collect(self._pool, *token[1:]))

    def _gone(self) -> Lost:
        at_s = now_s()
        self.kill(_EXIT_S)  # its connection may end before it does, and the exit code is the reason
        code = self._process.exitcode
        return Lost(_described(code), "", at_s, exited=code is not None and code >= 0)

    def _hung(self, timeout_s: float) -> Lost:
        at_s = now_s()
        dump = self._ask_for_dump()
        self.kill()
        return Lost(f"gave no answer for {timeout_s:g} s and was killed", dump, at_s, exited=False)

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

    def dismiss(self) -> None:
        """Ask it to go; :meth:`kill` waits until it has."""
        self._connection.close()

    def end(self) -> None:
        """End it by force, while another thread may wait for its answer: that one cleans up."""
        self._process.kill()

    def kill(self, after_s: float = 0.0) -> None:
        """See that it is gone, by force if it does not go within ``after_s``."""
        self._connection.close()
        if after_s:
            self._process.join(after_s)
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()
        self._dump.close()


def dismiss_all(workers: list[WorkerProcess]) -> None:
    """End all of them; they go at the same time."""
    if any(worker.parent_pid != os.getpid() for worker in workers):
        return  # a fork of the process that started them
    for worker in workers:
        worker.dismiss()
    deadline_s = now_s() + _GOODBYE_S
    for worker in workers:  # one that is still importing would take seconds to notice
        worker.kill(max(0.01, deadline_s - now_s()) if worker.ready else 0.0)


def rebuilt(failed: Failed, note: str) -> BaseException:
    """Return the worker's exception as it was raised, with its traceback as a note."""
    error: BaseException = RuntimeError(f"{failed.kind}, which cannot be sent; see the notes.")
    if failed.error is not None:
        with contextlib.suppress(Exception):  # its class may be made where only the worker has been
            kind, args, attributes = load(failed.error)
            found: BaseException = kind.__new__(
                kind, *args
            )  # an `__init__` may want other arguments
            found.args = args
            found.__dict__.update(attributes)  # the notes are among them
            explain_error(found)
            error = found
    error.add_note(f"{note} There:\n{failed.text.rstrip()}")
    return error


def _described(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (by somebody, or by the kernel for lack of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
