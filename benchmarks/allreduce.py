"""``make bench-allreduce``: an all-reduce over shared memory beside gloo's, and MPI's.

Both have a group of the same ranks and take turns within each round, so that whatever else the
machine does meets both. What is timed is `torch.distributed.all_reduce` of a tensor in ordinary
memory, call after call, as rank 0 sees it. MPI, where it is installed, comes after them. Then the
ranks are timed once more beside processes that keep cores busy, as other work on a machine does.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.command import Aims, Out, begin, command_line, progress, read_counts
from benchmarks.machine import Machine
from benchmarks.mpi import has_mpi, measure_mpi
from benchmarks.old_report import Cell, Column, Judged, Report, Row, Sheet, publish
from benchmarks.panels import Line, Lines
from benchmarks.processes import Child
from phalanx.clock import now_s
from phalanx.errors import PeerError
from phalanx.launching import RankFailed, launch

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100_000_000)
BUSY_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
BUSY = (1, 2)  # numbers of processes that keep a core busy
_BUSY_LOOP = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""  # ends with its stdin, so also with the process that started it
_BYTES_PER_TURN = 4 << 20  # small calls are repeated until about so much has gone through
_MOST_CALLS = 200
_TIMEOUT_S = 120.0

BACKENDS = ("phalanx", "gloo")
MPI = "mpi"
_WITHIN_S = {4 << 10: 30e-6}  # of two ranks
_SHARE_OF_COPY = 0.5  # algorithm bandwidth of two ranks, from 4 MiB on
_SHARE_FROM_BYTES = 4 << 20
_TIMES_MPI = 2.5  # as fast, with two ranks, from 4 MiB on

Seconds = dict[str, dict[int, list[float]]]  # of a call, by backend and size, one per round


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One size with one number of ranks: seconds of a call by backend, one per round.

    Attributes:
        busy: How many other processes kept a core busy meanwhile.
    """

    ranks: int
    num_bytes: int
    seconds: Mapping[str, Sequence[float]]
    busy: int = 0

    def median_s(self, backend: str) -> float:
        """Return the median of a backend's rounds."""
        return median(self.seconds[backend])

    def speedup_over(self, backend: str) -> float:
        """Return the median of ``backend`` over ours."""
        return self.median_s(backend) / self.median_s("phalanx")

    @property
    def bytes_per_s(self) -> float:
        """Our algorithm bandwidth: bytes of the tensor over seconds of the call."""
        return self.num_bytes / self.median_s("phalanx")


def target(timing: Timing) -> float | None:
    """Return how many times as fast as gloo a call shall be, if that was said.

    Example:
        >>> target(Timing(ranks=2, num_bytes=16 << 10, seconds={}))
        10.0
    """
    if timing.ranks > 2 or timing.busy:
        return 1.0
    if timing.num_bytes <= 64 << 10:
        return 10.0
    return 5.0 if timing.num_bytes >= 1 << 20 else None


def allreduce(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each backend per size.")] = 15,
    out: Out = Path("out/bench-allreduce"),
    aims: Aims = False,
) -> None:
    """Time all-reduces of 4 KiB to 100 MB: `phalanx` beside gloo, in the same processes.

    MPI comes after them, where `mpirun` and the package mpi4py are installed. Ranks that failed
    are an error: exit code 1.
    """
    counts = read_counts("ranks", ranks, least=2)
    console, machine = begin()
    timings: list[Timing] = []
    failures: dict[str, str] = {}
    configurations = [(count, busy) for count in counts for busy in (0, *BUSY)]
    what = f"{len(configurations)} configurations, {rounds} rounds"
    with progress(console, len(configurations) + 1, what) as show:
        show("how fast memory is copied")
        copy_bytes_per_s = copy_bandwidth()
        for count, busy in configurations:
            sizes = BUSY_SIZES if busy else SIZES
            name = f"{count} ranks beside {busy} busy processes" if busy else f"{count} ranks"
            show(f"{name}, {len(sizes)} sizes, {rounds} rounds")
            try:
                with busy_processes(busy):
                    seconds = launch(measure, count, args=(sizes, rounds))[0]
            except RankFailed as error:
                failures[name] = str(error)
                continue
            if has_mpi() and not busy:
                try:
                    seconds[MPI] = measure_mpi(count, {n: calls_of(n) for n in sizes}, rounds)
                except PeerError as error:
                    failures[f"{count} ranks of MPI"] = str(error)
            timings += [
                Timing(
                    ranks=count,
                    num_bytes=size,
                    seconds={backend: seconds[backend][size] for backend in seconds},
                    busy=busy,
                )
                for size in sizes
            ]
    command = command_line("allreduce", ranks=",".join(map(str, counts)), rounds=rounds)
    report = report_allreduce(timings, failures, machine, command, copy_bytes_per_s)
    publish(report, console, out, aims=aims)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let so many processes keep a core busy each until the body ends."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(Child((sys.executable, "-c", _BUSY_LOOP)))
        yield


def copy_bandwidth(num_bytes: int = 100_000_000, times: int = 7) -> float:
    """Return the bytes per second that one thread copies between two large tensors, at best."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = []
        for _ in range(times):
            since = now_s()
            target.copy_(source)
            taken.append(now_s() - since)
    finally:
        torch.set_num_threads(threads)
    return num_bytes / min(taken)


def calls_of(num_bytes: int) -> int:
    """Return how many calls of a size a turn has."""
    return max(1, min(_MOST_CALLS, _BYTES_PER_TURN // num_bytes))


def measure(sizes: tuple[int, ...], rounds: int) -> Seconds:
    """Time both backends; in every rank of a job."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("phalanx", timeout=timeout)
    groups = {name: dist.new_group(timeout=timeout, backend=name) for name in BACKENDS}
    seconds: Seconds = {name: {size: [] for size in sizes} for name in BACKENDS}
    for size in sizes:
        tensor = torch.ones(size // 4)
        calls = calls_of(size)
        for _ in range(rounds):
            for name, group in groups.items():
                seconds[name][size].append(_turn(group, tensor, calls))
    dist.destroy_process_group()
    return seconds


def _turn(group: dist.ProcessGroup, tensor: torch.Tensor, calls: int) -> float:
    """Return the seconds of one call; the first finds cold caches and does not count."""
    tensor.fill_(1.0)
    dist.all_reduce(tensor, group=group)
    since = now_s()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    taken = (now_s() - since) / calls
    dist.barrier()
    return taken


def report_allreduce(
    timings: Sequence[Timing],
    failures: Mapping[str, str],
    machine: Machine,
    command: str,
    copy_bytes_per_s: float,
) -> Report:
    """Return what the calls took."""
    backends = [*BACKENDS, *([MPI] if any(MPI in timing.seconds for timing in timings) else [])]
    rows: list[Row] = []
    panels: list[Lines] = []
    for (ranks, busy), found in groupby(timings, key=lambda timing: (timing.ranks, timing.busy)):
        group = list(found)
        words = f"{ranks} ranks" + (f", {busy} of the cores busy with other work" if busy else "")
        rows.append(Row(words))
        for timing in group:
            cells = _cells(timing, backends[1:], copy_bytes_per_s)
            rows.append(Row(f"  {_size(timing.num_bytes)}", cells))
        lines = []
        for backend in backends:
            some = [timing for timing in group if backend in timing.seconds]
            points = tuple((each.num_bytes, 1e6 * each.median_s(backend)) for each in some)
            if points:
                lines.append(Line(label=backend, points=points, ours=backend == "phalanx"))
        panels.append(
            Lines(
                title=words,
                note="µs of a call",
                lines=tuple(lines),
                ticks={float(timing.num_bytes): _size(timing.num_bytes) for timing in group},
                log_x=True,
                log_y=True,
            )
        )
    columns = [Column("phalanx", "µs")]
    for peer in backends[1:]:
        columns += [Column("MPI" if peer == MPI else peer, "µs"), Column("÷ phalanx")]
    columns.append(Column("phalanx", "GB/s"))
    title = f"Median of a call; one thread copies {copy_bytes_per_s / 1e9:.1f} GB/s"
    return Report(
        name="allreduce",
        title="All-reduce on one host",
        command=command,
        machine=machine,
        sheets=(Sheet(title, tuple(columns), tuple(rows)),),
        panels=tuple(panels),
        measured={
            "copy_bytes_per_s": copy_bytes_per_s,
            "timings": [asdict(timing) for timing in timings],
        },
        failures=failures,
    )


def _cells(timing: Timing, peers: Sequence[str], copy_bytes_per_s: float) -> tuple[Cell, ...]:
    """Return a row's cells; most targets are for two ranks on a machine at rest."""
    alone = timing.ranks == 2 and not timing.busy
    large = timing.num_bytes >= _SHARE_FROM_BYTES
    limit_s = _WITHIN_S.get(timing.num_bytes) if alone else None
    limit_us = None if limit_s is None else 1e6 * limit_s
    cells: list[Cell] = [_judged(1e6 * timing.median_s("phalanx"), limit_us)]
    least = {"gloo": target(timing), MPI: _TIMES_MPI if timing.ranks == 2 and large else None}
    for peer in peers:
        if peer in timing.seconds:
            ratio = _judged(timing.speedup_over(peer), least[peer], at_least=True)
            cells += [1e6 * timing.median_s(peer), ratio]
        else:
            cells += [None, None]
    share = _SHARE_OF_COPY * copy_bytes_per_s / 1e9 if alone and large else None
    return (*cells, _judged(timing.bytes_per_s / 1e9, share, at_least=True))


def _judged(value: float, limit: float | None, *, at_least: bool = False) -> Cell:
    return value if limit is None else Judged(value, limit, at_least)


def _size(num_bytes: int) -> str:
    if num_bytes % 1000 == 0:
        return f"{num_bytes // 1_000_000} MB"
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"
