"""`DataParallel` over worker processes, for executor groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from phalanx.errors import UnsupportedError
from phalanx.execution import Executor, ProcessExecutor, WorkerFailure, check_shareable
from phalanx.memory import SharedMemoryPool
from phalanx.parallel.connection import Connection
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.remote_graph import RemoteGraph
from phalanx.replicas import batch_norm_names
from phalanx.types import Device, Nested

__all__ = ["RemoteParallel", "SharedShelf"]


class SharedShelf:
    """The shelves of several executors, which find the parameters that they share in one place.

    Each executor has a shelf of its own, because a shelf frees nothing while its executor works;
    what one has moved to its shelf, the others' hold as well.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._shelves: weakref.WeakSet[SharedMemoryPool] = weakref.WeakSet()

    def open(self, parameters: Iterable[nn.Parameter]) -> SharedMemoryPool:
        """Return a shelf for one more executor, with what others have of its ``parameters``."""
        shelf = SharedMemoryPool(self._directory)
        for parameter in parameters:
            for other in self._shelves:
                shelf.share(other, parameter)
        self._shelves.add(shelf)
        return shelf


class RemoteParallel(DataParallel):
    """Run ``module`` in worker processes of this host; otherwise as `DataParallel` does.

    A worker that is lost is replaced, in forward, in backward and between them, and the bits stay
    the same. It is what an executor group with ``executor="processes"`` runs on.

    Args:
        shelf: Where parameters lie while workers run.
        timeout_s: How long one pass may take in a worker before it counts as hung.
        on_failure: Called for every lost worker, in any thread; what it raises ends the pass.

    Raises:
        UnsupportedError: A device is no CPU; or batch norm is to be synchronised.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | int | None = None,
        *,
        workloads: Sequence[float] | str | None = None,
        buffers: str | Mapping[str, str] = "mean",
        shelf: SharedShelf,
        timeout_s: float,
        on_failure: Callable[[WorkerFailure], None],
    ) -> None:
        super().__init__(module, devices, workloads=workloads, buffers=buffers)
        self.shelf = shelf
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._graphs: weakref.WeakSet[RemoteGraph] = weakref.WeakSet()
        self._refuse_devices()
        self._refuse_meetings()
        check_shareable(module)

    @property
    def pids(self) -> list[int]:
        """The workers' process numbers; empty before the first pass."""
        executor = self._running.executor
        return executor.pids if isinstance(executor, ProcessExecutor) else []

    def close(self) -> None:
        """Dismiss the workers, and with them the graphs that they keep; the next pass makes new."""
        for graph in self._graphs:
            graph.dismiss()
        super().close()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, worker processes"

    # Any: as in `DataParallel`.
    def forward_loss(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a group's losses are its module's own."""
        raise _elsewhere("forward_loss")

    def no_sync(self) -> NoReturn:
        """Refuse: workers keep no gradients."""
        raise _elsewhere("no_sync")

    def _refuse_devices(self) -> None:
        others = [str(device) for device in self._devices if device.type != "cpu"]
        if others:
            raise UnsupportedError(
                f"`devices` must be CPUs for executor='processes', but hold {', '.join(others)}. "
                "Use "
                "executor='threads', which serves several devices from one process."
            )

    def _refuse_meetings(self) -> None:
        names = (
            f"{name}.running_mean" if name else "running_mean"
            for name in batch_norm_names(self.module)
        )
        name = next((name for name in names if self._rules.of(name) == "sync"), None)
        if name is not None and len(self._devices) > 1:
            raise UnsupportedError(
                f"`buffers` must be 'mean', 'first' or 'sum' for executor='processes', but is "
                "'sync' "
                f"for `{name}`. Use executor='threads', whose batch norms can wait for each other."
            )

    def _make_executor(self) -> Executor:
        return ProcessExecutor(
            self.module,
            len(self._devices),
            shelf=self.shelf.open(self.module.parameters()),
            workloads=self._workloads,
            intra_op=self._intra_op,
            rules=self._rules,
            timeout_s=self._timeout_s,
            on_failure=self._on_failure,
        )

    def _open_graph(
        self, executor: Executor, parts: Sequence[Nested | None], seed: tuple[int, ...]
    ) -> Connection:
        assert isinstance(executor, ProcessExecutor)
        graph = RemoteGraph(executor, parts, seed, self._alive)
        self._graphs.add(graph)
        return graph

    def _alive(self) -> frozenset[int]:
        return frozenset(graph.number for graph in self._graphs if graph.is_whole)


def _elsewhere(method: str) -> UnsupportedError:
    return UnsupportedError(
        f"`{method}()` needs replicas in this process, but they are in others. Use `DataParallel`."
    )
