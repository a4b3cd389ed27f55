"""What of ``make bench-tables`` is a target, and how it was met. Nothing here runs anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.table_tasks import ARRAY_ELEMENTS, SIZES, Task

__all__ = ["Verdict", "flood_rows_per_s", "gb_per_s", "judge"]

Medians = Mapping[str, Mapping[Task, float]]
"""Median seconds by contestant and task."""

_MOST_US = {"get": 15.0, "add": 25.0}  # at 10 rows
_MOST_OVER_TORCH = {
    ("get", 1_000): 3.0,
    ("add", 1_000): 3.0,
    ("get", 100_000): 1.5,
    ("add", 100_000): 1.8,  # the undo record included
}
_LEAST_OVER_RPC = {"get": (25.0, 40.0, 10.0), "add": (10.0, 15.0, 1.5)}  # at SIZES
_LEAST_ARRAY_GB_PER_S = 6.0
_LEAST_SPEEDUP = 1.6
_LEAST_SNAPSHOT_GB_PER_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a target was met.

    Args:
        what: What it is about.
        unit: Of aim and measured: "µs", "×" or "GB/s".
        aim: What was asked for.
        at_most: Whether it is an upper bound, else a lower one.
        measured: What this run has shown; None where a contestant is missing.
    """

    what: str
    unit: str
    aim: float
    at_most: bool
    measured: float | None

    @property
    def met(self) -> bool | None:
        """Whether the aim was reached; None where nothing was measured."""
        if self.measured is None:
            return None
        return self.measured <= self.aim if self.at_most else self.measured >= self.aim


def judge(medians: Medians, snapshot_bytes: int) -> list[Verdict]:
    """Return every target, in the order of the issue; the other worker is idle, unless said.

    Example:
        >>> judge({"phalanx": {Task(kind="get", rows=10): 5e-6}}, 10**9)[0].met
        True
    """
    return [*_latencies(medians), *_rates(medians, snapshot_bytes)]


def _latencies(medians: Medians) -> Iterator[Verdict]:
    for kind, aim in _MOST_US.items():
        ours = medians.get("phalanx", {}).get(Task(kind=kind, rows=10))
        yield Verdict(
            what=f"{kind} {_count(10)}",
            unit="µs",
            aim=aim,
            at_most=True,
            measured=None if ours is None else 1e6 * ours,
        )
    for (kind, rows), aim in _MOST_OVER_TORCH.items():
        task = Task(kind=kind, rows=rows)
        yield Verdict(
            what=f"{kind} {_count(rows)}, over torch's kernel",
            unit="×",
            aim=aim,
            at_most=True,
            measured=_ratio(medians, ("phalanx", task), ("torch", task)),
        )
    for kind, aims in _LEAST_OVER_RPC.items():
        for rows, aim in zip(SIZES, aims, strict=True):
            task = Task(kind=kind, rows=rows)
            yield Verdict(
                what=f"{kind} {_count(rows)}, torch RPC over ours",
                unit="×",
                aim=aim,
                at_most=False,
                measured=_ratio(medians, ("rpc", task), ("phalanx", task)),
            )


def _rates(medians: Medians, snapshot_bytes: int) -> Iterator[Verdict]:
    for kind in ("get", "add"):
        yield Verdict(
            what=f"{kind} the array of {4 * ARRAY_ELEMENTS // 10**6} MB",
            unit="GB/s",
            aim=_LEAST_ARRAY_GB_PER_S,
            at_most=False,
            measured=gb_per_s(medians, "phalanx", f"array {kind}", 4 * ARRAY_ELEMENTS),
        )
    for rows in SIZES[1:]:
        one, two = (Task(kind="flood", rows=rows, both=both, fresh=True) for both in (False, True))
        yield Verdict(
            what=f"adds of {rows:,}, two workers over one, 4 shards",
            unit="×",
            aim=_LEAST_SPEEDUP,
            at_most=False,
            measured=_ratio(medians, ("phalanx", one), ("phalanx", two)),
        )
    disk = gb_per_s(medians, "snapshot", "disk", snapshot_bytes)
    yield Verdict(
        what=f"snapshot of {snapshot_bytes / 1e9:.2g} GB, the other worker adds",
        unit="GB/s",
        aim=min(_LEAST_SNAPSHOT_GB_PER_S, _LEAST_SNAPSHOT_GB_PER_S if disk is None else disk),
        at_most=False,
        measured=gb_per_s(medians, "snapshot", "snapshot", snapshot_bytes),
    )


def gb_per_s(medians: Medians, name: str, kind: str, num_bytes: int) -> float | None:
    """Return a rate; bytes of the value count once."""
    for task, seconds in medians.get(name, {}).items():
        if task.kind == kind:
            return num_bytes / seconds / 1e9
    return None


def flood_rows_per_s(medians: Medians, name: str, task: Task) -> float | None:
    """Return how many rows all workers at work have added per second."""
    seconds = medians.get(name, {}).get(task)
    return None if seconds is None else 1 / seconds


def _ratio(medians: Medians, above: tuple[str, Task], below: tuple[str, Task]) -> float | None:
    found = [medians.get(name, {}).get(task) for name, task in (above, below)]
    return None if None in found else found[0] / found[1]  # type: ignore[operator]


def _count(rows: int) -> str:
    return f"{rows:,} rows"
