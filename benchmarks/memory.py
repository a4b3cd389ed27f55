"""``make bench-memory``: what a configuration's processes hold together, and what grows with them.

Each configuration runs alone, case after case (see `holding`), and is weighed between two steps: by
the kernel's proportional set size, which counts a page that several processes share once. Pages
of files, such as torch's own code, are left out: they depend on who else runs torch just now.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Aims, Out, begin, command_line, progress, read_counts
from benchmarks.holding import CASES, CONFIGURATIONS, MemoryJob, commands_of
from benchmarks.machine import Machine
from benchmarks.old_report import Column, Judged, Report, Row, Sheet, publish
from benchmarks.panels import Bar, Bars
from benchmarks.turns import Runner
from phalanx.errors import PeerError, UnsupportedError

WIDTH = 1024
_STEPS = 4
_PROC = Path("/proc")
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")
_MIB = 1 << 20

TITLES = {"processes": "Trainer, worker processes", "ddp": "DDP over gloo"}
JUDGED = "processes"
AT_MOST = 1.05  # parameters and optimizer state, of any number of workers over one

# By part of a configuration's memory: the case that holds it, and the one that does not.
PARTS = {
    "parameters": ("parameters", "nothing"),
    "optimizer state": ("optimizer", "gradients"),
    "gradients": ("gradients", "parameters"),
}


@dataclass(frozen=True, kw_only=True)
class Weight:
    """What the processes of one configuration hold together, by case."""

    configuration: str
    workers: int
    bytes_by_case: Mapping[str, int]

    def part(self, name: str) -> int:
        """Return the bytes of one of `PARTS`, or of the ``"rest"``."""
        if name == "rest":
            return self.bytes_by_case["nothing"]
        with_it, without = PARTS[name]
        return self.bytes_by_case[with_it] - self.bytes_by_case[without]

    @property
    def state(self) -> int:
        """Bytes of parameters and optimizer state."""
        return self.part("parameters") + self.part("optimizer state")


def growth(weight: Weight, weights: Sequence[Weight]) -> float | None:
    """Return a configuration's parameters and optimizer state over those of its fewest workers."""
    same = [each for each in weights if each.configuration == weight.configuration]
    fewest = min(same, key=lambda each: each.workers)
    return None if fewest is weight else weight.state / fewest.state


def memory(
    workers: Annotated[
        str, typer.Option(help="How many worker processes, and ranks, separated by commas.")
    ] = "1,2,3",
    megabytes: Annotated[
        int, typer.Option(min=4, help="MiB of parameters that the net has, in steps of 4.")
    ] = 128,
    out: Out = Path("out/bench-memory"),
    aims: Aims = False,
) -> None:
    """Weigh parameters, optimizer state and gradients: worker processes beside DDP.

    A configuration that failed is an error: exit code 1.
    """
    counts = read_counts("workers", workers, least=1)
    if not (_PROC / "self" / "smaps_rollup").exists():
        raise UnsupportedError("`make bench-memory` reads /proc, which this system has not.")
    console, machine = begin()
    weights: list[Weight] = []
    failures: dict[str, str] = {}
    num_turns = len(CONFIGURATIONS) * len(counts) * len(CASES)
    what = f"{num_turns} configurations, one after the other"
    with progress(console, num_turns, what) as show, tempfile.TemporaryDirectory() as folder:
        for configuration, count in [(name, count) for name in CONFIGURATIONS for count in counts]:
            bytes_by_case: dict[str, int] = {}
            try:
                for case in CASES:
                    show(f"{configuration} · {count} workers · {case}")
                    job = MemoryJob(
                        configuration=configuration,
                        case=case,
                        workers=count,
                        width=WIDTH,
                        layers=megabytes * _MIB // (4 * WIDTH * WIDTH),
                        meeting_point=os.path.join(folder, f"{configuration}-{count}-{case}"),
                    )
                    bytes_by_case[case] = weigh(job)
            except PeerError as error:
                failures[f"{configuration}, {count} workers"] = str(error)
            else:
                weights.append(
                    Weight(configuration=configuration, workers=count, bytes_by_case=bytes_by_case)
                )
    publish(report_memory(weights, failures, machine, megabytes), console, out, aims=aims)


def weigh(job: MemoryJob) -> int:
    """Return the bytes that all processes of a configuration hold together, after some steps.

    Raises:
        PeerError: One of them has failed or is silent.
    """
    with Runner({job.configuration: commands_of(job)}) as runner:
        runner.start(job.configuration)
        runner.run(job.configuration, _STEPS)
        for error in runner.failures.values():
            raise error
        return sum(held_bytes(pid) for pid in descendants(runner.pids))


def descendants(pids: list[int]) -> list[int]:
    """Return these processes, their children, and so on."""
    parent_by_pid = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parent_by_pid[int(folder.name)] = int(fields[1])
    found = list(pids)
    for pid in found:  # grows on the way
        found += [child for child, parent in parent_by_pid.items() if parent == pid]
    return found


def held_bytes(pid: int) -> int:
    """Return what a process holds: its own pages, and its part of those that it shares."""
    lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    fields = [line.split() for line in lines]
    return sum(int(words[1]) << 10 for words in fields if words[0] in _COUNTED)


def report_memory(
    weights: Sequence[Weight], failures: Mapping[str, str], machine: Machine, megabytes: int
) -> Report:
    """Return what the configurations weigh."""
    parts = (*PARTS, "rest")
    rows: list[Row] = []
    for configuration, title in TITLES.items():
        rows.append(Row(title))
        for weight in weights:
            if weight.configuration == configuration:
                factor = growth(weight, weights)
                judged = factor is not None and configuration == JUDGED
                sizes = [weight.part(name) / _MIB for name in parts]
                whole = weight.bytes_by_case["optimizer"] / _MIB
                grown = Judged(factor, AT_MOST) if judged else factor
                rows.append(Row(f"  {weight.workers} workers", (grown, *sizes, whole)))
    headings = ("parameters", "optimizer", "gradients", "rest", "all")
    columns = (Column("growth", "×"), *(Column(heading, "MiB") for heading in headings))
    title = f"Memory of all processes, {megabytes} MiB of parameters and AdamW"
    bars = tuple(
        Bar(
            label=f"{TITLES[weight.configuration]}, {weight.workers}",
            parts=tuple(weight.part(name) / _MIB for name in parts),
        )
        for weight in weights
    )
    counts = ",".join(str(count) for count in sorted({each.workers for each in weights}))
    return Report(
        name="memory",
        title=title,
        command=command_line("memory", workers=counts, megabytes=megabytes),
        machine=machine,
        sheets=(Sheet(title, columns, tuple(rows)),),
        panels=(Bars(title="all processes", note="MiB", bars=bars, parts=parts),),
        measured={"megabytes": megabytes, "configurations": [asdict(each) for each in weights]},
        failures=failures,
    )
