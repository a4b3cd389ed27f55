"""What the formations weigh: a table, JSON, and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.machine import Machine
from benchmarks.record import headlines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "AT_MOST",
    "PARTS",
    "SCHEMA",
    "Weight",
    "as_json",
    "draw_memory",
    "growth",
    "memory_table",
]

SCHEMA = "phalanx.bench.memory/1"
TITLES = {"processes": "Trainer, worker processes", "ddp": "DDP over gloo"}

# By part of a formation's memory: the case that holds it, and the one that does not.
PARTS = {
    "parameters": ("parameters", "nothing"),
    "optimizer state": ("optimizer", "gradients"),
    "gradients": ("gradients", "parameters"),
}
AT_MOST = 1.05  # parameters and optimizer state, of any number of workers over one
_JUDGED = "processes"
_STATE = ("parameters", "optimizer state")
_COLOURS = {
    "parameters": "#0f766e",
    "optimizer state": "#5eaaa3",
    "gradients": "#c9ced4",
    "rest": "#eceef1",
}
_GREY, _INK = "#6b7280", "#1f2933"
_MIB = 1 << 20


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
        return sum(self.part(name) for name in _STATE)


def growth(weight: Weight, weights: Sequence[Weight]) -> float | None:
    """Return a formation's parameters and optimizer state over those of its fewest workers."""
    same = [each for each in weights if each.formation == weight.formation]
    fewest = min(same, key=lambda each: each.workers)
    return None if fewest is weight else weight.state / fewest.state


def memory_table(weights: Sequence[Weight], megabytes: int) -> Table:
    """Return the table; growth with a target is marked as met or missed."""
    table = Table(
        title=f"\nMiB in all processes; {megabytes} MiB of parameters, AdamW",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("workers", no_wrap=True)
    for heading in ("parameters\n+ optimizer", "growth", "gradients", "rest", "all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for formation, title in TITLES.items():
        table.add_section()
        table.add_row(Text(title, style="bold" if formation == _JUDGED else ""))
        for weight in weights:
            if weight.formation != formation:
                continue
            table.add_row(
                f"  {weight.workers}",
                f"{_mib(weight.part('parameters'))} + {_mib(weight.part('optimizer state'))}",
                _growth_cell(weight, weights),
                _mib(weight.part("gradients")),
                _mib(weight.part("rest")),
                _mib(weight.bytes_by_case["optimizer"]),
            )
    return table


def _growth_cell(weight: Weight, weights: Sequence[Weight]) -> Text:
    factor = growth(weight, weights)
    if factor is None:
        return Text("–")
    if weight.formation != _JUDGED:
        return Text(f"{factor:.2f}")
    met = factor <= AT_MOST
    mark = "✓" if met else "✗"
    return Text(f"{factor:.2f} ≤{AT_MOST:.2f} {mark}", style="green" if met else "red")


def as_json(
    weights: Sequence[Weight],
    failures: Mapping[str, str],
    machine: Machine,
    **settings: Any,  # Any: JSON
) -> str:
    """Return everything that was weighed, in bytes."""
    report = {
        "schema": SCHEMA,
        "machine": asdict(machine),
        **settings,
        "formations": [
            {
                **asdict(weight),
                "bytes_by_part": {name: weight.part(name) for name in (*PARTS, "rest")},
                "growth": growth(weight, weights),
            }
            for weight in weights
        ],
        "failures": headlines(failures),
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


def draw_memory(weights: Sequence[Weight], machine: Machine, path: Path, *, megabytes: int) -> None:
    """Draw a bar for every formation, of its parts, into a PNG file."""
    # Slow: half a second that no contestant's process should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.0 + 0.42 * max(1, len(weights))), layout="constrained")
    FigureCanvasAgg(figure)
    _draw_bars(figure.subplots(), weights)
    figure.suptitle(
        f"Memory of all processes, {megabytes} MiB of parameters and AdamW",
        fontsize=15,
        weight="bold",
        color=_INK,
    )
    commit = f" · commit {machine.commit}" if machine.commit else ""
    figure.supxlabel(
        f"{machine.cpu}, {machine.cores} cores · torch {machine.torch} · "
        f"phalanx {machine.phalanx}{commit} · {machine.date}",
        fontsize=8.5,
        color=_GREY,
    )
    figure.savefig(path, dpi=130)


def _draw_bars(axis: Axes, weights: Sequence[Weight]) -> None:
    rows = list(reversed(weights))  # barh counts from below
    for height, weight in enumerate(rows):
        left = 0.0
        for name, colour in _COLOURS.items():
            width = weight.part(name) / _MIB
            label = name if height == 0 else None
            axis.barh(height, width, left=left, height=0.7, color=colour, label=label)
            if name in (*_STATE, "gradients") and width > 0:
                axis.annotate(
                    f"{width:.0f}",
                    (left + width / 2, height),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if name == "parameters" else _INK,
                )
            left += width
    axis.set_yticks(
        range(len(rows)), [f"{TITLES[row.formation]}, {row.workers}" for row in rows], fontsize=9
    )
    axis.set_title("MiB", loc="right", fontsize=8.5, color=_GREY)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    if rows:
        axis.legend(frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f}"
