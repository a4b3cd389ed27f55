"""Child processes of a benchmark: start them, hear a line from each, and end them.

A child is told what to do by its command line and by lines on its stdin, and answers by lines on
its stdout. Its stderr goes to a file: nobody has to empty that while the child is being timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Protocol, Self

import phalanx
from phalanx.clock import now_s
from phalanx.errors import PeerLost, PeerTimeout
from phalanx.ipc import die_with_parent

GRACE_S = 3.0  # for a child to end by itself when its stdin has ended
_LAST_WORDS_BYTES = 4000
# A contestant sets its own numbers of threads or is measured with torch's, never with the caller's.
_ENVIRONMENT_LEFT_OUT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

Command = tuple[str, ...]


class Job(Protocol):
    """A dataclass of JSON values that says what a process does."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # Any: as typeshed has it

    def run(self) -> None:
        """Do it, in a process that has nothing else to do."""


def command_of(job: Job) -> Command:
    """Return the command line of a process that runs ``job``."""
    kind = type(job)
    program = (
        f"import json, sys; from {kind.__module__} import {kind.__name__} as Job; "
        "Job(**json.loads(sys.argv[1])).run()"
    )
    return (sys.executable, "-c", program, json.dumps(asdict(job)))


def claim_stdout() -> IO[str]:
    """Return a child's stdout, for its answers; what is printed from here on goes to stderr.

    The kernel ends the child when its parent has ended: a stopped one would not see its stdin end.
    """
    die_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


class Child:
    """A process that was started, its two pipes, and the file that takes its stderr.

    Args:
        command: Its command line; it finds these very packages.
        environment: Variables that it has beside the caller's.
    """

    def __init__(self, command: Command, environment: Mapping[str, str] | None = None) -> None:
        self._heard = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in `end`
        try:
            # A session of its own: Ctrl-C reaches the parent alone, which ends its children.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,
                env={**_environment(), **(environment or {})},
            )
        except BaseException:
            self._errors.close()
            raise
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders, self.answers = self.process.stdin, self.process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end([self])

    def send(self, line: str) -> None:
        """Give an order. If the child has ended, `hear` finds out, and why."""
        with contextlib.suppress(BrokenPipeError):
            self.orders.write(line.encode() + b"\n")

    def listen(self) -> bool:
        """Take what has come; return False if nothing will come any more."""
        piece = os.read(self.answers.fileno(), 1 << 16)
        self._heard += piece
        return bool(piece)

    @property
    def has_line(self) -> bool:
        """Whether a line was listened to and not yet taken."""
        return b"\n" in self._heard

    def take_line(self) -> bytes:
        """Return the first line that was not yet taken."""
        line, self._heard = self._heard.split(b"\n", 1)
        return line

    def status(self) -> str:
        """Say how it ended."""
        try:
            code = self.process.wait(GRACE_S)  # its pipe is closed, so it is about to end
        except subprocess.TimeoutExpired:
            return "its stdout is closed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def last_words(self) -> str:
        """Return the end of its stderr."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _LAST_WORDS_BYTES))
        return self._errors.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Take leave of a process that has ended."""
        for file in (self.orders, self.answers, self._errors):
            file.close()


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _ENVIRONMENT_LEFT_OUT}
    sources = [str(Path(package).parents[1]) for package in (__file__, phalanx.__file__)]
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*sources, environment.get("PYTHONPATH")])
    )
    return environment


def hear(name: str, children: Sequence[Child], timeout_s: float) -> list[bytes]:
    """Return the next line of each of the processes of contestant ``name``.

    All are listened to at once: when one dies, another usually fails for want of it a moment later,
    and the one that is heard first is the cause.

    Raises:
        PeerLost: One ended; the message holds what it said last.
        PeerTimeout: One did not answer in time.
    """
    deadline_s = now_s() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, child in enumerate(children):
            if not child.has_line:
                selector.register(child.answers, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - now_s()))
            if not ready:
                late = [key.data for key in selector.get_map().values()]
                raise PeerTimeout(
                    f"Contestant `{name}`: process {late[0]} of {len(children)} did not answer "
                    f"within {timeout_s:g} s.{_last_words(children, late)}",
                    rank=late[0],
                )
            for key, _ in ready:
                rank, child = key.data, children[key.data]
                if not child.listen():
                    echoes = [other for other in range(len(children)) if other != rank]
                    raise PeerLost(
                        f"Contestant `{name}`: process {rank} of {len(children)} ended "
                        f"({child.status()}).{_last_words(children, [rank, *echoes])}",
                        rank=rank,
                    )
                if child.has_line:
                    selector.unregister(child.answers)
    return [child.take_line() for child in children]


def _last_words(children: Sequence[Child], ranks: Sequence[int]) -> str:
    said = {rank: children[rank].last_words() for rank in ranks}
    return "".join(f"\nProcess {rank} said last:\n{words}" for rank, words in said.items() if words)


def end(children: Sequence[Child], *, grace_s: float | None = None, term: bool = False) -> None:
    """End ``children``: by the end of their input, and after ``grace_s`` by force.

    Args:
        term: They are sent SIGTERM too, as launchers are, which then end their ranks.
    """
    try:
        for child in children:
            child.orders.close()
            child.answers.close()  # one that goes on by itself ends at its next line
            child.process.send_signal(signal.SIGCONT)
            if term:
                child.process.terminate()
        deadline_s = now_s() + (GRACE_S if grace_s is None else grace_s)
        for child in children:
            child.process.wait(max(0.0, deadline_s - now_s()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
        for child in children:
            child.process.wait()
            child.close()
