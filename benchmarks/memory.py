"""``make bench-memory``: what a formation's processes hold together, and what grows with them.

Each formation runs alone, case after case (see `holding`), and is weighed between two steps: by
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

from benchmarks.arena import Arena
from benchmarks.holding import CASES, FORMATIONS, MemoryJob, entrant
from benchmarks.machine import Machine, describe_machine
from benchmarks.panels import Bar, Bars
from benchmarks.report import Column, Judged, Report, Row, Sheet, command_line, publish
from benchmarks.step import introduce, turn_progress
from phalanx.cli.console import make_console
from phalanx.errors import ConfigError, PeerError, UnsupportedError

__all__ = ["Weight", "descendants", "growth", "held_bytes", "memory", "report_memory", "weigh"]

DEFAULT_OUT = Path("out/bench-memory")
WIDTH = 1024
_STEPS = 4
_PROC = Path("/proc")
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")
_MIB = 1 << 20

TITLES = {"processes": "Trainer, worker processes", "ddp": "DDP over gloo"}
JUDGED = "processes"
AT_MOST = 1.05  # parameters and optimizer state, of any number of workers over one

# By part of a formation's memory: the case that holds it, and the one that does not.
PARTS = {
    "parameters": ("parameters", "nothing"),
    "optimizer state": ("optimizer", "gradients"),
    "gradients": ("gradients", "parameters"),
}


@dataclass(frozen=True, kw_only=True)
class Weight:
    """What the processes of one formation hold together, by case."""

    formation: str
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
    """Return a formation's parameters and optimizer state over those of its fewest workers."""
    same = [each for each in weights if each.formation == weight.formation]
    fewest = min(same, key=lambda each: each.workers)
    return None if fewest is weight else weight.state / fewest.state


def memory(
    workers: Annotated[
        str, typer.Option(help="How many worker processes, and ranks, separated by commas.")
    ] = "1,2,3",
    megabytes: Annotated[
        int, typer.Option(min=4, help="MiB of parameters that the net has, in steps of 4.")
    ] = 128,
    out: Annotated[
        Path, typer.Option(help="Folder for memory.json and memory.png; older ones are replaced.")
    ] = DEFAULT_OUT,
) -> None:
    """Weigh parameters, optimizer state and gradients: worker processes beside DDP.

    A missed target is marked and is no error; a formation that failed is: exit code 1.
    """
    counts = _counts(workers)
    if not (_PROC / "self" / "smaps_rollup").exists():
        raise UnsupportedError("`make bench-memory` reads /proc, which this system has not.")
    console = make_console()
    machine = describe_machine()
    introduce(console, machine)
    layers = megabytes * (1 << 20) // (4 * WIDTH * WIDTH)
    weights: list[Weight] = []
    failures: dict[str, str] = {}
    num_turns = len(FORMATIONS) * len(counts) * len(CASES)
    with turn_progress(console, num_turns) as show, tempfile.TemporaryDirectory() as folder:
        if not console.is_terminal:
            console.print(f"{num_turns} formations, one after the other")
        for formation in FORMATIONS:
            for count in counts:
                bytes_by_case: dict[str, int] = {}
                try:
                    for case in CASES:
                        show(f"{formation} · {count} workers · {case}")
                        name = f"{formation}-{count}-{case}"
                        job = MemoryJob(
                            formation=formation,
                            case=case,
                            workers=count,
                            width=WIDTH,
                            layers=layers,
                            meeting_point=os.path.join(folder, name),
                        )
                        bytes_by_case[case] = weigh(job)
                except PeerError as error:
                    failures[f"{formation}, {count} workers"] = str(error)
                    continue
                weights.append(
                    Weight(formation=formation, workers=count, bytes_by_case=bytes_by_case)
                )
    report = report_memory(weights, failures, machine, megabytes)
    publish(report, console, out)


def _counts(workers: str) -> list[int]:
    words = [word.strip() for word in workers.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"`--workers` must be whole numbers from 1 on, separated by commas, but is {workers!r}."
        )
    return sorted({int(word) for word in words})


def weigh(job: MemoryJob) -> int:
    """Return the bytes that all processes of a formation hold together, after some steps.

    Raises:
        PeerError: One of them has failed or is silent.
    """
    with Arena([entrant(job)]) as arena:
        arena.greet(job.formation)
        arena.run(job.formation, _STEPS)
        return sum(held_bytes(pid) for pid in descendants(arena.pids))


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
    """Return what the formations weigh."""
    parts = (*PARTS, "rest")
    rows: list[Row] = []
    for formation, title in TITLES.items():
        rows.append(Row(title))
        for weight in weights:
            if weight.formation == formation:
                factor = growth(weight, weights)
                judged = factor is not None and formation == JUDGED
                sizes = [weight.part(name) / _MIB for name in parts]
                whole = weight.bytes_by_case["optimizer"] / _MIB
                grown = Judged(factor, AT_MOST) if judged else factor
                rows.append(Row(f"  {weight.workers} workers", (grown, *sizes, whole)))
    headings = ("parameters", "optimizer", "gradients", "rest", "all")
    columns = (Column("growth", "×"), *(Column(heading, "MiB") for heading in headings))
    title = f"Memory of all processes, {megabytes} MiB of parameters and AdamW"
    bars = tuple(
        Bar(
            label=f"{TITLES[weight.formation]}, {weight.workers}",
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
        measured={"megabytes": megabytes, "formations": [asdict(each) for each in weights]},
        failures=failures,
    )
