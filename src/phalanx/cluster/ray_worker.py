"""One worker on Ray: an actor that starts a process, hands its output on, and sees it end.

    driver ──start, read, read, …──► actor ──pipes──► process of the worker ──► its host's server

The script runs in a process of its own, as under the other launchers: it begins with no thread of
Ray's, its exit code and the signal that killed it are its own, and Ray, which ends the children of
its actors, leaves alone the server that outlives it. The kernel ends the process with the actor.

The secret, the function and what it returns lie in files without a name, which end with the actor
and the process, however these end.

The module imports no torch, and Ray only where Ray has loaded it: the actor has no use for them.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, NamedTuple

__all__ = ["Ended", "Lines", "RayWorker"]

_READ_BYTES = 1 << 16
_PROGRAM = "from phalanx.distributed.rank_start import call; call()"


class Lines(NamedTuple):
    """Lines that a worker has written.

    Attributes:
        stream: 1 for stdout, 2 for stderr.
        lines: In order, without their ends.
    """

    stream: int
    lines: list[str]


class Ended(NamedTuple):
    """How a worker has ended.

    Attributes:
        pid: Its process.
        exit_code: The process's, or minus the signal that killed it.
        outcome: What it has left, as `distributed/rank_start.py` writes it; empty if nothing.
    """

    pid: int
    exit_code: int
    outcome: bytes


class RayWorker:
    """The actor; its methods are called by the driver, :meth:`end` while :meth:`read` waits."""

    def node(self) -> str:
        """Return Ray's id of the node where this actor is."""
        import ray  # an extra

        found: str = ray.get_runtime_context().get_node_id()
        return found

    def free_port(self) -> int:
        """Return a port that is free on this node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, call: bytes, folder: str, variables: Mapping[str, str], secret: bytes) -> int:
        """Start the process; return its number.

        Args:
            call: The function and its arguments, pickled.
            folder: Where it runs, if this node has such a folder.
            variables: Its environment, beside the actor's own.
            secret: What tables are encrypted with.
        """
        self._secret, self._outcome = _nameless_file(), _nameless_file()
        self._secret.write(secret)
        self._secret.flush()
        mine = {
            "PYTHONPATH": os.pathsep.join(
                filter(None, sys.path)
            ),  # which Ray has made the driver's
            "PHALANX_SECRET_FILE": f"/proc/{os.getpid()}/fd/{self._secret.fileno()}",
        }
        outcome = self._outcome.fileno()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(call)
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, str(os.getpid()), str(outcome)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[outcome],
                cwd=folder if os.path.isdir(folder) else None,
                env={**os.environ, **mine, **variables},
            )
        self._end = os.pidfd_open(self._process.pid)
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._end, selectors.EVENT_READ)
        self._rest: dict[int, bytes] = {}
        for stream, pipe in enumerate((self._process.stdout, self._process.stderr), start=1):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._waiting.register(pipe.fileno(), selectors.EVENT_READ, stream)
            self._rest[stream] = b""
        return self._process.pid

    def read(self) -> list[Lines] | Ended:
        """Return what the worker has written since the last call, or how it has ended.

        The pipes may outlive it, in the hands of its host's server: only its process tells its end.

        Blocks: Until there is either.
        """
        while True:
            ready = {key.fd: key.data for key, _ in self._waiting.select()}
            has_ended = ready.pop(self._end, 0) is None
            found = [Lines(stream, self._take(fd, stream)) for fd, stream in ready.items()]
            if has_ended and not ready:
                found = [
                    Lines(stream, [_text(rest)]) for stream, rest in self._rest.items() if rest
                ]
                self._rest = dict.fromkeys(self._rest, b"")
            found = [each for each in found if each.lines]
            if found:
                return found
            if has_ended and not ready:
                exit_code = self._process.wait()
                self._outcome.seek(0)
                return Ended(self._process.pid, exit_code, self._outcome.read())

    def _take(self, fd: int, stream: int) -> list[str]:
        """Read from a pipe; return the lines that are whole."""
        found = os.read(fd, _READ_BYTES)
        if not found:
            self._waiting.unregister(fd)
        *lines, self._rest[stream] = (self._rest[stream] + found).split(b"\n")
        return [_text(line) for line in lines]

    def end(self, grace_s: float) -> None:
        """End the process: by SIGTERM, and by SIGKILL if it is there after ``grace_s`` seconds."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()


def _nameless_file() -> IO[bytes]:
    return tempfile.TemporaryFile()  # its mode is 0600; the owner can open /proc/<pid>/fd/<n>


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
