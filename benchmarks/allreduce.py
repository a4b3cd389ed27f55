"""``python -m benchmarks allreduce``: an all-reduce over shared memory beside gloo's.

Each backend has ranks of its own, which take turns at every size. What is timed is
`torch.distributed.all_reduce` of a tensor in ordinary memory, call after call, as rank 0 sees it;
then once more beside processes that keep cores busy, as other work on a machine does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.contest import Turn, busy_processes, command_of, compete, seconds_of, serve
from benchmarks.report import OUT, Cell, Out, Run, Sheet, ratio, read_counts
from benchmarks.step import process_group

BACKENDS = ("phalanx", "gloo")
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100_000_000)
BUSY_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_BUSY = (0, 1, 2)  # other processes that keep a core busy
_BYTES_PER_TURN = 4 << 20  # small calls are repeated until about so much has been reduced
_MOST_CALLS = 200


@dataclass(frozen=True, kw_only=True)
class AllreduceJob:
    """A rank of a backend; it is asked for a number of bytes."""

    backend: str
    rank: int
    ranks: int
    folder: str

    def run(self) -> None:
        """Be the rank."""
        serve(self._turns())

    @contextmanager
    def _turns(self) -> Iterator[Turn]:
        with process_group(self.backend, self.rank, self.ranks, self.folder):
            yield lambda num_bytes: [_seconds_of_call(torch.ones(num_bytes // 4))]


def _seconds_of_call(tensor: torch.Tensor) -> float:
    calls = max(1, min(_MOST_CALLS, _BYTES_PER_TURN // tensor.nbytes))

    def several() -> None:
        for _ in range(calls):
            dist.all_reduce(tensor)

    several()  # finds cold caches, and cores that were idle
    tensor.fill_(1.0)
    return seconds_of(several) / calls


def allreduce(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each backend per size.")] = 15,
    out: Out = OUT,
) -> None:
    """Time all-reduces of 4 KiB to 100 MB over phalanx and gloo, idle and beside busy processes."""
    counts = read_counts("ranks", ranks, least=2)
    run = Run("allreduce", out)
    rows: list[tuple[Any, ...]] = []  # Any: a label, then cells
    measured, failures = {}, {}
    for count, busy in [(count, busy) for count in counts for busy in _BUSY]:
        sizes = BUSY_SIZES if busy else SIZES
        name = f"{count} ranks" + (f" beside {busy} busy processes" if busy else "")
        with (
            run.progress(rounds * len(BACKENDS) * len(sizes)) as show,
            tempfile.TemporaryDirectory() as folder,
            busy_processes(busy),
        ):
            commands = {}
            for backend in BACKENDS:
                place = Path(folder, backend)
                place.mkdir()
                jobs = [
                    AllreduceJob(backend=backend, rank=rank, ranks=count, folder=str(place))
                    for rank in range(count)
                ]
                commands[backend] = [command_of(job) for job in jobs]
            outcome = compete(commands, {size: size for size in sizes}, rounds, show)
        measured[name] = outcome.record()
        failures.update({f"{key}, {name}": why for key, why in outcome.failures.items()})
        rows.append((name,))
        rows += [(f"  {_size(size)}", *_cells(outcome.medians(size), size)) for size in sizes]
    columns = ("phalanx\nµs", "gloo\nµs", "gloo ÷\nphalanx", "phalanx\nGB/s")
    run.publish([Sheet("One all-reduce, median", columns, rows)], measured, failures)


def _cells(medians: dict[str, float], num_bytes: int) -> list[Cell]:
    ours, gloo = (medians.get(backend) for backend in BACKENDS)
    rate = ratio(num_bytes / 1e9, ours)
    return [ours and 1e6 * ours, gloo and 1e6 * gloo, ratio(gloo, ours), rate]


def _size(num_bytes: int) -> str:
    if num_bytes % 1000 == 0:
        return f"{num_bytes // 1_000_000} MB"
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"
