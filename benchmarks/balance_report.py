"""What balanced workloads came to: a table, JSON, and a figure of the shares over the steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.arena import Outcome, Pace
from benchmarks.machine import Machine
from benchmarks.record import headlines
from benchmarks.slowed import SLOW, Account
from benchmarks.standings import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "SCHEMA",
    "TARGETS",
    "Contest",
    "as_json",
    "balance_table",
    "draw_balance",
    "ratio",
    "verdicts",
]

SCHEMA = "phalanx.bench.balance/1"

# By case: a contestant, whom it is measured against, and the most that the ratio may be.
TARGETS = {
    "slowed": (("auto", "ideal", 1.10), ("auto", "even", 1 / 1.4)),
    "equal": (("auto", "even", 1.02),),
}
_CONTAINERS = {"trainer": "Trainer", "dataparallel": "DataParallel"}
_SPLITS = {"even": "even shares", "auto": "balanced shares", "ideal": "ideal shares"}
_COLOURS = {"trainer": "#0f766e", "dataparallel": "#c2410c"}
_QUIET, _GREY, _INK = "#9aa3ad", "#6b7280", "#1f2933"
_STEPS_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What was measured.

    Args:
        slowdown: How many times slower the slow replica is.
        seconds_per_row: What a row takes a replica that is not slowed.
        outcome: By contestant: ``container-case-split``, such as ``trainer-slowed-auto``.
        accounts: What they told beside it.
    """

    model: str
    slowdown: float
    seconds_per_row: float
    outcome: Outcome
    accounts: Mapping[str, Account]


def ratio(contest: Contest, name: str, baseline: str) -> float | None:
    """Return how many times ``baseline``'s step takes ``name``'s: the median over the rounds.

    Round by round, so that a machine that is slower for a while is so for both.
    """
    ours, theirs = (contest.outcome.seconds.get(each) for each in (name, baseline))
    if not ours or not theirs:
        return None
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def verdicts(contest: Contest, container: str, case: str, split: str) -> list[Verdict]:
    """Return how a contestant met its targets."""
    found = []
    for contestant, baseline, at_most in TARGETS[case]:
        measured = ratio(contest, f"{container}-{case}-{split}", f"{container}-{case}-{baseline}")
        if contestant == split and measured is not None:
            found.append(Verdict(baseline=baseline, at_most=at_most, ratio=measured))
    return found


def balance_table(contest: Contest) -> Table:
    """Return the table; a ratio with a target is marked as met or missed."""
    table = Table(
        title=f"\n{contest.model}, 2 replicas: one training step in ms, and as a multiple",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("contestant", no_wrap=True)
    for heading in ("median", "÷ even", "÷ ideal", "last rows"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in TARGETS:
        slow = f"replica {SLOW} {contest.slowdown:g}× slower" if case == "slowed" else "equal"
        table.add_section()
        table.add_row(Text(slow, style="italic"))
        for container, title in _CONTAINERS.items():
            for split, shares in _SPLITS.items():
                name = f"{container}-{case}-{split}"
                if name in contest.outcome.seconds:
                    style = "bold" if split == "auto" else ""
                    table.add_row(f"{title}, {shares}", *_cells(contest, name), style=style)
    return table


def _cells(contest: Contest, name: str) -> list[Text]:
    container, case, split = name.split("-")
    marks = {each.baseline: each for each in verdicts(contest, container, case, split)}
    cells = [Text(f"{1e3 * _median(contest, name):.2f}")]
    for baseline in ("even", "ideal"):
        measured = ratio(contest, name, f"{container}-{case}-{baseline}")
        if measured is None or baseline == split:
            cells.append(Text("–"))
        elif baseline in marks:
            met = marks[baseline].met
            cells.append(
                Text(
                    f"{measured:.2f} ≤{marks[baseline].at_most:.2f} {'✓' if met else '✗'}",
                    style="green" if met else "red",
                )
            )
        else:
            cells.append(Text(f"{measured:.2f}"))
    told = contest.accounts.get(name)
    cells.append(Text(":".join(map(str, told.shares[-1])) if told and told.shares else "–"))
    return cells


def as_json(contest: Contest, machine: Machine, pace: Pace) -> str:
    """Return everything that was measured, down to the single step and decision."""
    report = {
        "schema": SCHEMA,
        "machine": asdict(machine),
        "pace": asdict(pace),
        "model": contest.model,
        "slowdown": contest.slowdown,
        "seconds_per_row": contest.seconds_per_row,
        "contestants": {name: _as_dict(contest, name) for name in contest.outcome.seconds},
        "failures": headlines(contest.outcome.failures),
    }
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


# Any: the values of JSON objects are of all kinds.
def _as_dict(contest: Contest, name: str) -> Mapping[str, Any]:
    container, case, split = name.split("-")
    told = contest.accounts.get(name, Account(shares=[], decisions=[]))
    seconds = contest.outcome.seconds[name]
    return {
        "container": container,
        "slowed": case == "slowed",
        "split": split,
        "median_s": _median(contest, name),
        "min_s": min(step for turn in seconds for step in turn),
        "ratio_by_split": {
            other: measured
            for other in _SPLITS
            if (measured := ratio(contest, name, f"{container}-{case}-{other}")) is not None
        },
        "targets": [
            {**asdict(each), "met": each.met} for each in verdicts(contest, container, case, split)
        ],
        "seconds_by_round": seconds,
        "shares": told.shares,
        "decisions": [asdict(each) for each in told.decisions],
    }


def _median(contest: Contest, name: str) -> float:
    return statistics.median(step for turn in contest.outcome.seconds[name] for step in turn)


def draw_balance(contest: Contest, machine: Machine, path: Path) -> None:
    """Draw the slow replica's share over the steps, and what steps take, into a PNG file."""
    # Slow: half a second that no contestant's process should pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_shares(left, contest)
    _draw_times(right, contest)
    figure.suptitle(
        f"Balanced workloads on two replicas, one of them {contest.slowdown:g}× slower",
        fontsize=15,
        weight="bold",
        color=_INK,
    )
    commit = f" · commit {machine.commit}" if machine.commit else ""
    figure.supxlabel(
        f"{contest.model} · {machine.cpu}, {machine.cores} cores · torch {machine.torch} · "
        f"phalanx {machine.phalanx}{commit} · {machine.date}",
        fontsize=8.5,
        color=_GREY,
    )
    figure.savefig(path, dpi=130)


def _draw_shares(axis: Axes, contest: Contest) -> None:
    """Draw the slow replica's share, step by step: solid where it is slow, dotted without."""
    end = 1
    for container, title in _CONTAINERS.items():
        for case, line in (("slowed", "-"), ("equal", ":")):
            told = contest.accounts.get(f"{container}-{case}-auto")
            if told is None:
                continue
            shares = [100 * rows[SLOW] / sum(rows) for rows in told.shares[:_STEPS_SHOWN]]
            end = max(end, len(shares))
            axis.step(
                range(1, len(shares) + 1),
                shares,
                where="mid",
                color=_COLOURS[container],
                linestyle=line,
                linewidth=2,
                label=f"{title}, {'slowed' if case == 'slowed' else 'equal replicas'}",
            )
    for share, words in ((50.0, "even"), (100 / (1 + contest.slowdown), "ideal")):
        axis.axhline(share, color=_QUIET, linewidth=1, linestyle="--", zorder=0)
        axis.annotate(
            words,
            (end + 0.5, share),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=_GREY,
        )
    axis.set_ylim(0, 62)
    axis.set_xlim(0.5, end + 0.5)
    axis.set_xlabel("step", color=_INK)
    axis.set_title(f"share of replica {SLOW}, % of the rows", loc="left", weight="bold", color=_INK)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, loc="lower right", fontsize=9)


def _draw_times(axis: Axes, contest: Contest) -> None:
    """Draw medians as bars, with their ratio to even shares beside them."""
    names = [name for name in _ordered() if name in contest.outcome.seconds]
    names.reverse()  # barh counts from below
    medians = [1e3 * _median(contest, name) for name in names]
    colours = [_COLOURS[name.split("-")[0]] for name in names]
    shades = [1.0 if name.endswith("-auto") else 0.4 for name in names]
    for height, (name, median) in enumerate(zip(names, medians, strict=True)):
        axis.barh(height, median, height=0.68, color=colours[height], alpha=shades[height])
        container, case, _ = name.split("-")
        measured = ratio(contest, name, f"{container}-{case}-even")
        beside = "" if measured is None or name.endswith("-even") else f"  {measured:.2f}×"
        axis.annotate(
            f"{median:.1f}{beside}",
            (median, height),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_INK,
        )
    axis.set_yticks(range(len(names)), [_label(name) for name in names], fontsize=9)
    axis.set_xlim(0, 1.3 * max(medians, default=1.0))
    axis.set_title("one step", loc="left", weight="bold", color=_INK)
    axis.set_title("median ms, × even", loc="right", fontsize=8.5, color=_GREY)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.xaxis.grid(True, color="#e5e7eb")
    axis.set_axisbelow(True)


def _ordered() -> Sequence[str]:
    return [
        f"{container}-{case}-{split}"
        for case in TARGETS
        for container in _CONTAINERS
        for split in _SPLITS
    ]


def _label(name: str) -> str:
    container, case, split = name.split("-")
    return f"{_CONTAINERS[container]}, {case}: {_SPLITS[split].removesuffix(' shares')}"
