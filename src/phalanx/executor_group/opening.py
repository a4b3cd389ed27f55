"""What a group's replicas are: threads of this process, or worker processes of this host."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from phalanx.execution import FailureLog, WorkerLost, check_patience
from phalanx.parallel import DataParallel, RemoteParallel, SharedShelf
from phalanx.plan import check_argument, check_function
from phalanx.types import Device

__all__ = ["ExecutorChoice", "share_shelf"]

_EXECUTORS = ("threads", "processes")


@dataclass(frozen=True, kw_only=True)
class ExecutorChoice:
    """Which executor, and what is done about the workers that it loses.

    Raises:
        ConfigError: Something is of the wrong kind.
    """

    executor: str
    timeout_s: float
    max_failures: int | None
    on_failure: Callable[[WorkerLost], object] | None
    memory_dir: str | Path | None

    def __post_init__(self) -> None:
        kinds = " or ".join(map(repr, _EXECUTORS))
        check_argument(self.executor in _EXECUTORS, "executor", f"be {kinds}", self.executor)
        check_patience(self.timeout_s, self.max_failures)
        if self.on_failure is not None:
            check_function("on_failure", self.on_failure)
        if self.memory_dir is not None:
            fits = isinstance(self.memory_dir, (str, os.PathLike))
            check_argument(fits, "memory_dir", "be a path", self.memory_dir)

    def open(
        self,
        module: nn.Module,
        devices: Sequence[Device] | int | None,
        failures: FailureLog,
        *,
        workloads: Sequence[float] | str | None,
        buffers: str | Mapping[str, str],
    ) -> DataParallel:
        """Return what runs ``module``."""
        if self.executor == "threads":
            model = DataParallel(module, devices, workloads=workloads, buffers=buffers)
            model.keep_inputs()  # as worker processes do
            return model
        folder = None if self.memory_dir is None else Path(self.memory_dir)
        return RemoteParallel(
            module,
            devices,
            workloads=workloads,
            buffers=buffers,
            shelf=SharedShelf(folder),
            timeout_s=self.timeout_s,
            on_failure=failures.add,
        )


def share_shelf(model: DataParallel, other: DataParallel) -> None:
    """Let the workers of both find the parameters that they share in one place.

    Otherwise each would move them to its own, and the other's workers would have to start anew.
    """
    if isinstance(model, RemoteParallel) and isinstance(other, RemoteParallel):
        model.shelf = other.shelf
