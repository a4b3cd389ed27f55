"""What the all-reduces took: a table, JSON, and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.machine import Machine
from benchmarks.record import headlines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BACKENDS", "SCHEMA", "Cell", "allreduce_table", "as_json", "draw_allreduce", "target"]

SCHEMA = "phalanx.bench.allreduce/2"
BACKENDS = ("phalanx", "gloo")
MPI = "mpi"
_COLOURS = {"phalanx": "#0f766e", "gloo": "#9aa3ae", MPI: "#c2854b"}
_GREY, _INK = "#6b7280", "#1f2933"
_WITHIN_S = {4 << 10: 30e-6}  # of two ranks
_SHARE_OF_COPY = 0.5  # algorithm bandwidth of two ranks, from 4 MiB on
_SHARE_FROM_BYTES = 4 << 20
_TIMES_MPI = 2.5  # as fast, with two ranks, from 4 MiB on


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One size with one number of ranks: seconds of a call by backend, one per round.

    Attributes:
        busy: How many other processes kept a core busy meanwhile.
    """

    ranks: int
    num_bytes: int
    seconds: Mapping[str, Sequence[float]]
    busy: int = 0

    @property
    def group(self) -> tuple[int, int]:
        """What a section of the table, or a panel of the figure, has in common."""
        return self.ranks, self.busy

    def median_s(self, backend: str) -> float:
        """Return the median of a backend's rounds."""
        return median(self.seconds[backend])

    @property
    def speedup(self) -> float:
        """Gloo's median over ours."""
        return self.speedup_over("gloo")

    def speedup_over(self, backend: str) -> float:
        """Return the median of ``backend`` over ours."""
        return self.median_s(backend) / self.median_s("phalanx")

    @property
    def bytes_per_s(self) -> float:
        """Our algorithm bandwidth: bytes of the tensor over seconds of the call."""
        return self.num_bytes / self.median_s("phalanx")


def target(cell: Cell) -> float | None:
    """Return how many times as fast as gloo a call shall be, if that was said.

    Example:
        >>> target(Cell(ranks=2, num_bytes=16 << 10, seconds={}))
        10.0
    """
    if cell.ranks > 2 or cell.busy:
        return 1.0
    if cell.num_bytes <= 64 << 10:
        return 10.0
    return 5.0 if cell.num_bytes >= 1 << 20 else None


def allreduce_table(cells: Sequence[Cell], copy_bytes_per_s: float) -> Table:
    """Return the table; a figure with a target is marked as met or missed."""
    table = Table(
        title=f"\nMedian of a call; one thread copies {copy_bytes_per_s / 1e9:.1f} GB/s",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    mpi = any(MPI in cell.seconds for cell in cells)
    peers = ("MPI", "÷ phalanx") if mpi else ()
    for heading in ("ranks", "busy", "size", "phalanx", "gloo", "÷ phalanx", *peers, "GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for cell in cells:
        if before not in (None, cell.group):
            table.add_section()
        before = cell.group
        table.add_row(
            str(cell.ranks),
            str(cell.busy) if cell.busy else "",
            _size(cell.num_bytes),
            _time_cell(cell),
            _time(cell.median_s("gloo")),
            _judged(f"{cell.speedup:.1f}", target(cell), cell.speedup),
            *(_mpi_cells(cell) if mpi else ()),
            _bandwidth_cell(cell, copy_bytes_per_s),
        )
    return table


def _mpi_cells(cell: Cell) -> tuple[str | Text, ...]:
    if MPI not in cell.seconds:
        return ("–", "–")
    least = _TIMES_MPI if cell.ranks == 2 and cell.num_bytes >= _SHARE_FROM_BYTES else None
    times = cell.speedup_over(MPI)
    return _time(cell.median_s(MPI)), _judged(f"{times:.2f}", least, times)


def _time_cell(cell: Cell) -> Text:
    shown, limit = _time(cell.median_s("phalanx")), _WITHIN_S.get(cell.num_bytes)
    if limit is None or cell.ranks > 2 or cell.busy:
        return Text(shown, style="bold")
    met = cell.median_s("phalanx") <= limit
    return Text(
        f"{shown} ≤{limit * 1e6:.0f} {'✓' if met else '✗'}", style="green" if met else "red"
    )


def _bandwidth_cell(cell: Cell, copy_bytes_per_s: float) -> Text:
    shown = f"{cell.bytes_per_s / 1e9:.2f}"
    if cell.ranks > 2 or cell.busy or cell.num_bytes < _SHARE_FROM_BYTES:
        return Text(shown)
    least = _SHARE_OF_COPY * copy_bytes_per_s / 1e9
    return _judged(shown, least, cell.bytes_per_s / 1e9)


def _judged(shown: str, least: float | None, value: float) -> Text:
    if least is None:
        return Text(shown)
    met = value >= least
    return Text(f"{shown} ≥{least:.3g} {'✓' if met else '✗'}", style="green" if met else "red")


def _size(num_bytes: int) -> str:
    if num_bytes % 1000 == 0:
        return f"{num_bytes // 1_000_000} MB"
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def as_json(
    cells: Sequence[Cell],
    failures: Mapping[str, str],
    machine: Machine,
    *,
    copy_bytes_per_s: float,
) -> str:
    """Return everything that was measured, in seconds."""
    report: dict[str, Any] = {  # Any: JSON
        "schema": SCHEMA,
        "machine": asdict(machine),
        "copy_bytes_per_s": copy_bytes_per_s,
        "cells": [
            {
                **asdict(cell),
                "median_s": {backend: cell.median_s(backend) for backend in cell.seconds},
                "least_s": {backend: min(cell.seconds[backend]) for backend in cell.seconds},
                "speedup": cell.speedup,
                "target": target(cell),
            }
            for cell in cells
        ],
        "failures": headlines(failures),
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


def draw_allreduce(
    cells: Sequence[Cell], machine: Machine, path: Path, *, copy_bytes_per_s: float
) -> None:
    """Draw time over size into a PNG file, in a panel for each `Cell.group`."""
    # Slow: half a second that no rank should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({cell.ranks for cell in cells}) or [2]
    levels = sorted({cell.busy for cell in cells}) or [0]
    size = (5.2 * len(counts) + 0.6, 4.0 * len(levels) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(levels), len(counts), squeeze=False, sharey=True)
    for row, busy in zip(axes, levels, strict=True):
        for axis, count in zip(row, counts, strict=True):
            _draw_lines(axis, [cell for cell in cells if cell.group == (count, busy)])
            beside = f", {busy} of the cores busy with other work" if busy else ""
            title = f"{count} ranks{beside}"
            axis.set_title(title, loc="left", fontsize=11, weight="bold", color=_INK)
        row[0].set_ylabel("seconds of a call", color=_INK)
    figure.suptitle("All-reduce on one host", fontsize=15, weight="bold", color=_INK)
    commit = f" · commit {machine.commit}" if machine.commit else ""
    figure.supxlabel(
        f"{machine.cpu}, {machine.cores} cores, copies {copy_bytes_per_s / 1e9:.1f} GB/s · "
        f"torch {machine.torch} · phalanx {machine.phalanx}{commit} · {machine.date}",
        fontsize=8.5,
        color=_GREY,
    )
    figure.savefig(path, dpi=130)


def _draw_lines(axis: Axes, cells: Sequence[Cell]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for backend in _COLOURS:
        measured = [cell for cell in cells if backend in cell.seconds]
        if not measured:
            continue
        axis.plot(
            [cell.num_bytes for cell in measured],
            [cell.median_s(backend) for cell in measured],
            marker="o",
            markersize=4,
            color=_COLOURS[backend],
            label=backend,
        )
    for cell in cells:
        axis.annotate(
            f"{cell.speedup:.1f}×",
            (cell.num_bytes, cell.median_s("phalanx")),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=_COLOURS["phalanx"],
        )
    axis.set_xticks(
        [cell.num_bytes for cell in cells], [_size(c.num_bytes) for c in cells], rotation=40
    )
    axis.minorticks_off()
    axis.grid(True, color="#e4e8ee")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if cells:
        axis.legend(frameon=False, fontsize=9)
