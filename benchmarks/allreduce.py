"""``python -m benchmarks allreduce``: an all-reduce over shared memory beside gloo's.

Each backend has ranks of its own, which take turns at every size. What is timed is
`torch.distributed.all_reduce` of a tensor in ordinary memory, call after call, as rank 0 sees it;
then once more beside processes that keep cores busy, as other work on a machine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.contest import Child, Turn, commands_of, end, seconds_of, serve
from benchmarks.report import OUT, Out, Rounds, Row, Run, Sheet, ratio
from benchmarks.step import join_ranks

BACKENDS = ("phalanx", "gloo")
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100_000_000)
BUSY_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_RANKS = (2, 4)
_BUSY = (0, 1, 2)  # other processes that keep a core busy
_BUSY_COMMAND = ("sh", "-c", "while kill -0 $PPID; do :; done")  # ends with this process
_BYTES_PER_TURN = 4 << 20  # small calls are repeated until about so much has been reduced
_MOST_CALLS = 200


@dataclass(frozen=True, kw_only=True)
class AllreduceJob:
    """A rank of a backend; it is asked for a number of bytes."""

    backend: str
    ranks: int
    rank: int = 0

    def run(self) -> None:
        """Be the rank."""
        serve(self.open_turn)

    def open_turn(self, stack: ExitStack) -> Turn:
        """Join the other ranks, and return what times a call of so many bytes."""
        join_ranks(stack, self.backend, self.rank, self.ranks)
        return lambda num_bytes: [_seconds_of_call(torch.ones(num_bytes // 4))]


def _seconds_of_call(tensor: torch.Tensor) -> float:
    calls = max(1, min(_MOST_CALLS, _BYTES_PER_TURN // tensor.nbytes))

    def several() -> None:
        for _ in range(calls):
            dist.all_reduce(tensor)

    several()  # finds cold caches, and cores that were idle
    tensor.fill_(1.0)
    return seconds_of(several) / calls


def allreduce(rounds: Rounds = 15, out: Out = OUT) -> None:
    """Time all-reduces of 4 KiB to 100 MB over phalanx and gloo, idle and beside busy processes."""
    run = Run("allreduce", out)
    rows: list[Row] = []
    for count, busy in [(count, busy) for count in _RANKS for busy in _BUSY]:
        sizes = BUSY_SIZES if busy else SIZES
        name = f"{count} ranks" + (f" beside {busy} busy processes" if busy else "")
        jobs = {backend: AllreduceJob(backend=backend, ranks=count) for backend in BACKENDS}
        commands = {backend: commands_of(job, count) for backend, job in jobs.items()}
        with _busy_processes(busy):
            outcome = run.compete(name, commands, {size: size for size in sizes}, rounds)
        rows.append((name,))
        rows += [(f"  {_size(size)}", *_cells(outcome.medians(size), size)) for size in sizes]
    columns = ("phalanx\nµs", "gloo\nµs", "gloo ÷\nphalanx", "phalanx\nGB/s")
    run.sheets.append(Sheet("One all-reduce, median", columns, rows))
    run.publish()


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Let so many other processes keep a core busy each."""
    children = [Child(f"busy {number}", _BUSY_COMMAND) for number in range(count)]
    try:
        yield
    finally:
        end(children)


def _cells(medians: dict[str, float], num_bytes: int) -> list[float | None]:
    ours, gloo = (medians.get(backend) for backend in BACKENDS)
    rate = ratio(num_bytes / 1e9, ours)
    return [ours and 1e6 * ours, gloo and 1e6 * gloo, ratio(gloo, ours), rate]


def _size(num_bytes: int) -> str:
    if num_bytes % 1000 == 0:
        return f"{num_bytes // 1_000_000} MB"
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"
