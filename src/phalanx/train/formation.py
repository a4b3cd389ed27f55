"""How many replicas, with how many threads each: given, or found out by a short trial."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phalanx.clock import now_s
from phalanx.distributed import num_ranks_here
from phalanx.execution import ExecutorChoice, default_intra_op
from phalanx.replicas import num_cores, resolve_devices
from phalanx.types import Device

__all__ = ["Formation", "candidates", "read_replicas", "try_out"]

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


def candidates(
    home: torch.device, microbatches: int, *, cores: int | None = None
) -> list[Formation]:
    """Return what `replicas="auto"` may choose from; each gives the same bits.

    On a CPU: one replica, two, or one per core, as far as there are microbatches for them.

    Example:
        >>> [str(each) for each in candidates(torch.device("cpu"), 4, cores=8)]
        ['1 replica × 1 thread', '2 replicas × 1 thread', '4 replicas × 1 thread']
    """
    if home.type != "cpu":
        return [Formation((home,), 1)]
    most = min(microbatches, num_cores() if cores is None else cores)
    return [Formation((home,) * count, 1) for count in sorted({1, min(2, most), most})]


def read_replicas(
    replicas: int | str | Sequence[Device],
    home: torch.device,
    intra_op: int | None,
    choice: ExecutorChoice,
) -> Formation | None:
    """Read the argument `replicas`; None for a formation that is to be found out.

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


def try_out(
    formations: Sequence[Formation],
    open_run: Callable[[Formation], tuple[Callable[[], None], Callable[[], None]]],
) -> tuple[Formation, str]:
    """Measure each formation, in turns, and return the fastest and a line that says why.

    Args:
        open_run: Returns, for a formation, a function that does one step's work without any effect,
            and one that frees what the first holds.
    """
    runs = [(formation, *open_run(formation)) for formation in formations]
    seconds: list[list[float]] = [[] for _ in runs]
    try:
        for _, run, _ in runs:
            run()  # the first time costs allocations and choices of kernels
        begin_s = now_s()
        for done in itertools.count(1):
            for times, (_, run, _) in zip(seconds, runs, strict=True):
                run()  # caches are the other formation's still
                start_s = now_s()
                run()
                times.append(now_s() - start_s)
            if done >= _MOST_ROUNDS or (done >= _LEAST_ROUNDS and now_s() - begin_s > _TRIAL_S):
                break
    finally:
        for _, _, close in runs:
            close()
    medians = [statistics.median(times) for times in seconds]
    best = min(range(len(runs)), key=medians.__getitem__)
    parts = [f"{f} {m * 1e3:.1f} ms" for (f, _, _), m in zip(runs, medians, strict=True)]
    parts.insert(0, parts.pop(best))
    return runs[best][0], "measured " + ", ".join(parts)
