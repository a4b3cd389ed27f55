"""``make bench-allreduce``: an all-reduce over shared memory beside gloo's, and MPI's.

Both have a group of the same ranks and take turns within each round, so that whatever else the
machine does meets both. What is timed is `torch.distributed.all_reduce` of a tensor in ordinary
memory, call after call, as rank 0 sees it. MPI, where it is installed, comes after them. Then the
ranks are timed once more beside processes that keep cores busy, as other work on a machine does.
"""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.allreduce_report import (
    BACKENDS,
    Cell,
    allreduce_table,
    as_json,
    draw_allreduce,
)
from benchmarks.machine import describe_machine
from benchmarks.mpi import ProcessFailed, has_mpi, measure_mpi
from benchmarks.step import introduce, turn_progress
from phalanx.cli.console import make_console
from phalanx.clock import now_s
from phalanx.distributed import RankFailed, launch
from phalanx.errors import ConfigError

__all__ = ["allreduce", "measure"]

DEFAULT_OUT = Path("out/bench-allreduce")
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

Seconds = dict[str, dict[int, list[float]]]  # of a call, by backend and size, one per round


def allreduce(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each backend per size.")] = 15,
    out: Annotated[
        Path,
        typer.Option(help="Folder for allreduce.json and allreduce.png; older ones are replaced."),
    ] = DEFAULT_OUT,
) -> None:
    """Time all-reduces of 4 KiB to 100 MB: `phalanx` beside gloo, in the same processes.

    MPI comes after them, where `mpirun` and the package mpi4py are installed. A missed target is
    marked and is no error; ranks that failed are: exit code 1.
    """
    counts = _counts(ranks)
    console = make_console()
    machine = describe_machine()
    introduce(console, machine)
    cells: list[Cell] = []
    failures: dict[str, str] = {}
    with turn_progress(console, len(counts) * (1 + len(BUSY)) + 1) as show:
        show("how fast memory is copied")
        copy_bytes_per_s = copy_bandwidth()
        for count, busy in [(count, busy) for count in counts for busy in (0, *BUSY)]:
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
                    calls = {size: calls_of(size) for size in SIZES}
                    seconds["mpi"] = measure_mpi(count, calls, rounds)
                except ProcessFailed as error:
                    failures[f"{count} ranks of MPI"] = str(error)
            cells += [
                Cell(
                    ranks=count,
                    num_bytes=size,
                    seconds={backend: seconds[backend][size] for backend in seconds},
                    busy=busy,
                )
                for size in sizes
            ]
    console.print(allreduce_table(cells, copy_bytes_per_s))
    for name, cause in failures.items():
        console.print(f"{name} failed.", style="red")
        console.print(cause)
    out.mkdir(parents=True, exist_ok=True)
    record = as_json(cells, failures, machine, copy_bytes_per_s=copy_bytes_per_s)
    (out / "allreduce.json").write_text(record, encoding="utf-8")
    draw_allreduce(cells, machine, out / "allreduce.png", copy_bytes_per_s=copy_bytes_per_s)
    console.print(f"Wrote {out / 'allreduce.json'} and {out / 'allreduce.png'}.")
    if failures:
        raise typer.Exit(1)


def _counts(ranks: str) -> list[int]:
    words = [word.strip() for word in ranks.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 1 for word in words):
        raise ConfigError(
            f"`--ranks` must be whole numbers from 2 on, separated by commas, but is {ranks!r}."
        )
    return sorted({int(word) for word in words})


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let so many processes keep a core busy each until the body ends."""
    command = [sys.executable, "-c", _BUSY_LOOP]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            stack.callback(process.kill)  # before the process is waited for
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
