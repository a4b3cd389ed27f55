"""Real processes that are ranks of one group, and run functions that a test hands them.

Making a group costs more than a call in it, so the ranks of one `Ranks` are used by many tests. If
one fails, all are ended, and started anew for the next call.
"""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.multiprocess.fork_server import context

COLLECTIVE_S = 20.0  # after that, a rank that waits for another reports where it waits
START_S = 60.0
PLAYED_HOSTS = "PHALANX_TEST_HOSTS"  # of all ranks, for what depends on them


class Ranks:
    """``size`` processes; use it as a context manager.

    Args:
        size: How many.
        deadline_s: How long one call may take, beyond what a start takes.
        backend: Of their group.
        hosts: The host that each rank plays to be on; all are on one if there is none.
    """

    def __init__(
        self,
        size: int = 3,
        *,
        deadline_s: float = 60.0,
        backend: str = "gloo",
        hosts: Sequence[str] = (),
    ) -> None:
        self.size = size
        self.hosts = hosts
        self.deadline_s = deadline_s
        self.backend = backend
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Call ``function(rank, *args)`` on every rank, and return the values by rank.

        Raises:
            AssertionError: A rank raised, died or was late; each rank's own traceback is in it.
        """
        seconds = self.deadline_s if self._processes else START_S + self.deadline_s
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args))  # plain pickle: tensors by value, not by shared file
        answers = {rank: self._ask(rank, call) for rank in range(self.size)}
        answers = {rank: answer for rank, answer in answers.items() if answer is not None}
        answers |= self._await(set(range(self.size)) - set(answers), time.monotonic() + seconds)
        if all(kind == "value" for kind, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.size)]
        self._kill()
        reports = (f"rank {rank}: {text}" for rank, (kind, text) in sorted(answers.items()))
        raise AssertionError("\n\n".join(["not every rank came through", *map(str, reports)]))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for connection in self._connections:
            try:
                connection.send_bytes(b"")
            except OSError:
                continue  # it has ended already
        for process in self._processes:
            process.join(5.0)
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, self.backend, self.hosts, store, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()  # else its end would not be seen as the end of the pipe
            self._processes.append(process)
            self._connections.append(ours)

    def _ask(self, rank: int, call: bytes) -> tuple[str, Any] | None:
        try:
            self._connections[rank].send_bytes(call)
        except OSError:
            return "died", "its process had ended before the call"
        return None

    def _await(self, waiting: set[int], moment: float) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        while waiting:
            by_connection = {self._connections[rank]: rank for rank in waiting}
            ready = wait(list(by_connection), max(0.0, moment - time.monotonic()))
            if not ready:
                late = ("late", "did not answer before the deadline")
                return answers | dict.fromkeys(waiting, late)
            for connection in ready:
                rank = by_connection[connection]
                waiting.discard(rank)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = ("died", "its process ended without an answer")
        return answers

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None


def _serve(
    rank: int, size: int, backend: str, hosts: Sequence[str], store: str, connection: Connection
) -> None:
    """Run what comes until the pipe ends or an empty message comes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    if hosts:
        os.environ["PHALANX_HOST"] = hosts[rank]
        os.environ[PLAYED_HOSTS] = ",".join(hosts)
    torch.set_num_threads(1)
    if backend == "phalanx":
        import phalanx  # noqa: F401 - registers it
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_S),
    )
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        if not call:
            return
        try:
            function, args = pickle.loads(call)
            answer = pickle.dumps(("value", function(rank, *args)))
        except BaseException:
            answer = pickle.dumps(("raised", traceback.format_exc()))
        connection.send_bytes(answer)
