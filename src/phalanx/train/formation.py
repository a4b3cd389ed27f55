"""How many replicas, with how many threads each: given, or chosen by a short measured trial."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.clock import now_s
from phalanx.distributed import num_ranks_here
from phalanx.execution import ExecutorChoice, ThreadExecutor, default_intra_op
from phalanx.replicas import num_cores, resolve_devices
from phalanx.train.microbatches import Splitter
from phalanx.train.objective import Objective, TrainTask
from phalanx.types import Device, Nested

__all__ = ["Formation", "choose_formation", "read_replicas"]

_TRIAL_S = 2.0
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 12


@dataclass(frozen=True)
class Formation:
    """A number of replicas, with a number of threads inside each.

    Attributes:
        devices: One per replica.
        intra_op: Threads inside operators, per replica.
    """

    devices: tuple[torch.device, ...]
    intra_op: int

    @property
    def size(self) -> tuple[int, int]:
        """How many replicas, with how many threads each."""
        return len(self.devices), self.intra_op

    def __str__(self) -> str:
        count = len(self.devices)
        threads = "thread" if self.intra_op == 1 else "threads"
        return f"{count} {'replica' if count == 1 else 'replicas'} × {self.intra_op} {threads}"


def read_replicas(
    replicas: int | str | Sequence[Device],
    home: torch.device,
    intra_op: int | None,
    choice: ExecutorChoice,
) -> Formation | None:
    """Read the argument `replicas`; None for "auto", where a trial is to choose.

    A rank has one replica unless told otherwise: there are as many ranks as the job was told. The
    caller's own thread is one replica.
    """
    if isinstance(replicas, str):
        if choice.kind not in ("ranks", "inline"):
            choice.refuse_devices([home])
            return None
        replicas = 1
    devices = resolve_devices(replicas, home, name="replicas")
    choice.refuse_devices(devices)
    everybody = devices * (num_ranks_here() if choice.kind == "ranks" else 1)
    return Formation(devices, intra_op or default_intra_op(everybody))


def choose_formation(
    module: nn.Module,
    splitter: Splitter,
    objective: Objective,
    batch: Nested,
    home: torch.device,
    *,
    measures: bool = True,
) -> tuple[Formation, str]:
    """Measure what `replicas="auto"` may be; return the fastest, and a line that says why.

    On a CPU: one replica, two, or one per core, as far as there are microbatches for them. Each
    gives the same bits. The trials change neither weights nor buffers.

    Args:
        batch: The trials compute its gradients.
        home: Where the replicas shall be.
        measures: False chooses the largest number without a trial. Worker processes need that:
            after a backward pass in the program, autograd refuses to work in a fork where torch
            sees a GPU.
    """
    assert splitter.microbatches is not None  # "auto" is refused without
    most = min(splitter.microbatches, num_cores()) if home.type == "cpu" else 1
    options = [Formation((home,) * count, 1) for count in sorted({1, min(2, most), most})]
    if len(options) == 1:
        return options[0], "the only choice"
    if not measures:
        return options[-1], "one worker process per core, as far as there are microbatches"
    executors = [ThreadExecutor(module, each.devices, intra_op=1) for each in options]
    runs = [_run_of(executor, splitter, objective, batch) for executor in executors]
    try:
        medians = _measure(runs)
    finally:
        for executor in executors:
            executor.close()
    best = medians.index(min(medians))
    parts = [f"{each} {s * 1e3:.1f} ms" for each, s in zip(options, medians, strict=True)]
    parts.insert(0, parts.pop(best))
    return options[best], "measured " + ", ".join(parts)


def _run_of(
    executor: ThreadExecutor, splitter: Splitter, objective: Objective, batch: Nested
) -> Callable[[], None]:
    """Return a function that computes the batch's gradients, to no effect."""
    pieces = splitter.split(batch, executor.workloads)
    task = TrainTask(objective, pieces.scales, keep_outputs=False)

    def run() -> None:
        with torch.enable_grad():
            executor.run(task, pieces.pieces, weights=pieces.weights, seed=(0,))

    return run


def _measure(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Return the median seconds of each run; they are made in turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()  # the first time costs allocations and choices of kernels
    begin_s = now_s()
    for done in range(1, _MOST_ROUNDS + 1):
        for times, run in zip(seconds, runs, strict=True):
            run()  # caches are another's still
            start_s = now_s()
            run()
            times.append(now_s() - start_s)
        if done >= _LEAST_ROUNDS and now_s() - begin_s > _TRIAL_S:
            break
    return [statistics.median(times) for times in seconds]
