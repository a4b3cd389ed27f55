"""All workers of a process executor: started together, replaced one by one, dismissed together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch

from phalanx.errors import PeerLost
from phalanx.execution.failures import WorkerFailure
from phalanx.execution.mailbox import Mailbox
from phalanx.execution.thread_pool import ThreadPool
from phalanx.execution.worker_client import START_S, Lost, Told, WorkerProcess, dismiss_all
from phalanx.execution.worker_main import WorkerInit, WorkerInitHandle
from phalanx.memory import SharedMemoryPool
from phalanx.replicas import Definitions, pack

__all__ = ["WorkerGroup"]


class WorkerGroup:
    """Worker processes, each looked after by a thread of this process.

    Args:
        threads: One for each worker, which it must outlive.
        pool: Memory that workers see.
        size: Number of workers.
        intra_op: Threads inside operators, per worker.
        definitions: Tell workers of code that they cannot import.
        on_failure: Called for every lost worker, in any thread.
    """

    def __init__(
        self,
        threads: ThreadPool,
        pool: SharedMemoryPool,
        size: int,
        intra_op: int,
        definitions: Definitions,
        on_failure: Callable[[WorkerFailure], None],
    ) -> None:
        self._threads = threads
        self._pool = pool
        self._intra_op = intra_op
        self._definitions = definitions
        self._on_failure = on_failure
        # A dead worker's are its replacement's: the pool frees nothing.
        self._mailboxes = [(Mailbox(pool), Mailbox(pool)) for _ in range(size)]
        self._workers: list[WorkerProcess] = []
        self._dismiss = weakref.finalize(self, dismiss_all, self._workers)

    def start(self, init: WorkerInit) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            PeerLost: One ended by itself, or was not ready in time.
        """
        self._init = self._stored(init)
        self._first_told = len(init.definitions)
        # Noted one by one: where another does not start, these are dismissed.
        self._threads.each(lambda index: self._workers.append(self._launch(index)))
        self._workers.sort(key=lambda worker: worker.index)
        self._threads.each(self._await_first)

    def _stored(self, init: WorkerInit) -> WorkerInitHandle:
        """Put it where workers read it; a message that long would wait until one has started."""
        packed = np.frombuffer(pack(init), dtype=np.uint8)
        memory = self._pool.allocate(len(packed), torch.uint8, torch.device("cpu"))
        memory.numpy()[:] = packed
        handle = self._pool.handle_of(memory)
        assert handle is not None
        return WorkerInitHandle(handle)

    def _launch(self, index: int) -> WorkerProcess:
        told = Told(self._definitions.packed, self._first_told)
        mail = self._mailboxes[index]
        return WorkerProcess(index, mail, self._intra_op, self._init, self._pool, told)

    def _await_first(self, index: int) -> None:
        try:
            if not self._workers[index].poll_ready(START_S):
                raise PeerLost(
                    f"Worker {index} must be ready within {START_S:g} s, but is not. Importing "
                    "what the module needs takes too long here; use executor='threads'.",
                    index,
                )
        except Lost as lost:
            if lost.exited:
                raise PeerLost(
                    f"Worker {index} must start, but {lost.reason} before it was ready. Its own "
                    "output says why.",
                    index,
                ) from None
            self.replace(index, lost)
            self._await_first(index)

    def __getitem__(self, index: int) -> WorkerProcess:
        return self._workers[index]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(list(self._workers))

    def replace(self, index: int, lost: Lost, microbatch: int | None = None) -> None:
        """Start another worker in the place of one that was lost, and report the loss.

        Args:
            microbatch: What the lost one had in hands.
        """
        failure = WorkerFailure(
            worker=index,
            pid=self._workers[index].pid,
            reason=lost.reason,
            microbatch=microbatch,
            dump=lost.dump,
            noticed_s=lost.at_s,
        )
        if not self._threads.closed:  # else it was left behind by an interrupt, and is being closed
            self._workers[index] = self._launch(index)
        self._on_failure(failure)

    def dismiss(self) -> None:
        """End all workers."""
        self._dismiss()
        self._workers.clear()
