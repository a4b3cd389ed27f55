"""``make bench-balance``: what balanced workloads gain beside a slow replica, and cost without.

Five contestants: a `Trainer` with one replica slowed (even, balanced and ideal shares) and with
equal replicas (even and balanced shares). How long the slow replica has to
wait for a row is measured first, so that it is as many times slower as was asked for.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Aims, Model, Out, begin, command_line, progress
from benchmarks.contestants import check_model
from benchmarks.machine import Machine
from benchmarks.panels import Bar, Bars, Line, Lines
from benchmarks.processes import command_of
from benchmarks.report import Cell, Column, Judged, Report, Row, Sheet, number, publish
from benchmarks.slowed import SLOW, BalanceJob, read_account
from benchmarks.turns import Outcome, Pace, Runner, compete
from phalanx.errors import ConfigError

SPLITS = {"even": "even shares", "auto": "balanced shares", "ideal": "ideal shares"}
SETTLING_STEPS = 10  # in which balanced shares must be found
_CALIBRATION_STEPS = 24
_STEPS_SHOWN = 60

# By case: of balanced shares, over which others the step takes at most how much.
TARGETS = {
    "slowed": {"ideal": 1.10, "even": 1 / 1.4},
    "equal": {"even": 1.02},
}


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What was measured.

    Args:
        slowdown: How many times slower the slow replica is.
        seconds_per_row: What a row takes a replica that is not slowed.
        outcome: By contestant: ``case-split``, such as ``slowed-auto``.
        accounts: What they told beside it (see `read_account`).
    """

    model: str
    slowdown: float
    seconds_per_row: float
    outcome: Outcome
    accounts: Mapping[str, Mapping[str, Any]]  # Any: JSON


def ratio(contest: Contest, name: str, baseline: str) -> float | None:
    """Return how many times ``baseline``'s step takes ``name``'s: the median over the rounds.

    Round by round, so that a machine that is slower for a while is so for both.
    """
    ours, theirs = (contest.outcome.seconds.get(each) for each in (name, baseline))
    if not ours or not theirs:
        return None
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def balance(
    model: Model = "mlp",
    slowdown: Annotated[
        float, typer.Option(help="How many times slower the slow replica is.")
    ] = 3.0,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps that count, at least, of each contestant.")
    ] = 60,
    out: Out = Path("out/bench-balance"),
    aims: Aims = False,
) -> None:
    """Time a training step on two unequal replicas: even, balanced and ideal shares.

    The same without a slow replica. Contestants take turns in one run, each in a process of its
    own. One that failed is an error: exit code 1.
    """
    check_model(model)
    if not slowdown > 1:
        raise ConfigError(f"`--slowdown` must be above 1, but is {slowdown!r}.")
    # It sleeps, mostly, so its core has not to settle.
    rounds = Pace.for_steps(steps).rounds
    pace = Pace(rounds=rounds, settle_s=0.0, warmup=SETTLING_STEPS)
    console, machine = begin()
    with tempfile.TemporaryDirectory() as folder:
        row_s = _seconds_per_row(model, Path(folder))
        console.print(
            f"{model}: a row takes a replica {1e6 * row_s:.0f} µs; the slow one waits "
            f"{1e6 * row_s * (slowdown - 1):.0f} µs more for each."
        )
        jobs = _jobs(model, slowdown, row_s, Path(folder))
        what = f"{len(jobs)} contestants, {rounds} rounds"
        with progress(console, len(jobs) * (rounds + 2), what) as show:
            commands = {name: [command_of(job)] for name, job in jobs.items()}
            outcome = compete(commands, pace, lambda name, doing: show(f"{doing} · {name}"))
        contest = Contest(
            model=model,
            slowdown=slowdown,
            seconds_per_row=row_s,
            outcome=outcome,
            accounts={name: read_account(Path(job.account)) for name, job in jobs.items()},
        )
    command = command_line("balance", model=model, slowdown=slowdown, steps=steps)
    publish(report_balance(contest, machine, pace, command), console, out, aims=aims)


def _seconds_per_row(model: str, folder: Path) -> float:
    """Measure what a row takes a replica that has another beside it.

    Raises:
        PeerError: The process that measures it has failed or is silent.
    """
    account = folder / "calibration"
    job = BalanceJob(workloads="auto", model=model, slow_s=0.0, account=str(account))
    with Runner({"calibration": [command_of(job)]}) as runner:
        runner.start("calibration")
        runner.run("calibration", _CALIBRATION_STEPS)
    for error in runner.failures.values():
        raise error
    late: list[list[float]] = read_account(account)["seconds_per_row"][_CALIBRATION_STEPS // 3 :]
    return statistics.median(seconds for step in late for seconds in step)


def _jobs(model: str, slowdown: float, row_s: float, folder: Path) -> dict[str, BalanceJob]:
    """Return the contestants by name: whether a replica is slowed, and the shares."""
    splits: dict[str, dict[str, str | Sequence[float] | None]] = {
        "slowed": {"even": None, "auto": "auto", "ideal": (slowdown, 1.0)},
        "equal": {"even": None, "auto": "auto"},
    }
    return {
        (name := f"{case}-{split}"): BalanceJob(
            workloads=workloads,
            model=model,
            slow_s=(slowdown - 1) * row_s if case == "slowed" else 0.0,
            account=str(folder / name),
        )
        for case, workloads_by_split in splits.items()
        for split, workloads in workloads_by_split.items()
    }


def report_balance(contest: Contest, machine: Machine, pace: Pace, command: str) -> Report:
    """Return what balanced shares gained and cost."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for case in TARGETS:
        slow = f"replica {SLOW} {contest.slowdown:g}× slower" if case == "slowed" else "equal"
        rows.append(Row(slow))
        for split, shares in SPLITS.items():
            name = f"{case}-{split}"
            if name in contest.outcome.seconds:
                ours = split == "auto"
                rows.append(Row(f"  {shares}", _cells(contest, name), ours=ours))
                bars.append(_bar(contest, name))
    columns = (Column("median", "ms"), Column("÷ even"), Column("÷ ideal"), Column("last rows"))
    title = f"{contest.model}, 2 replicas: one training step"
    return Report(
        name="balance",
        title=f"Balanced workloads on two replicas, one of them {contest.slowdown:g}× slower",
        command=command,
        machine=machine,
        sheets=(Sheet(title, columns, tuple(rows)),),
        panels=(
            _share_panel(contest),
            Bars(title="one step", note="median ms, × even", bars=tuple(bars)),
        ),
        measured={
            "model": contest.model,
            "slowdown": contest.slowdown,
            "seconds_per_row": contest.seconds_per_row,
            "pace": asdict(pace),
            "contestants": {
                name: {"seconds_by_round": turns, **contest.accounts[name]}
                for name, turns in contest.outcome.seconds.items()
            },
        },
        failures=contest.outcome.failures,
    )


def _median_ms(contest: Contest, name: str) -> float:
    turns = contest.outcome.seconds[name]
    return 1e3 * statistics.median(step for turn in turns for step in turn)


def _cells(contest: Contest, name: str) -> tuple[Cell, ...]:
    case, split = name.split("-")
    cells: list[Cell] = [_median_ms(contest, name)]
    for baseline in ("even", "ideal"):
        found = None
        if baseline != split:
            found = ratio(contest, name, f"{case}-{baseline}")
        limit = TARGETS[case].get(baseline) if split == "auto" else None
        cells.append(found if limit is None else Judged(found, limit))
    shares = contest.accounts[name]["shares"]
    cells.append(":".join(map(str, shares[-1])) if shares else None)
    return tuple(cells)


def _bar(contest: Contest, name: str) -> Bar:
    case, split = name.split("-")
    median_ms = _median_ms(contest, name)
    over_even = None if split == "even" else ratio(contest, name, f"{case}-even")
    beside = "" if over_even is None else f"  {over_even:.2f}×"
    return Bar(
        label=f"{case}: {SPLITS[split].removesuffix(' shares')}",
        parts=(median_ms,),
        text=f"{number(median_ms)}{beside}",
        ours=split == "auto",
    )


def _share_panel(contest: Contest) -> Lines:
    """Return the slow replica's share step by step: solid where it is slow, dotted without."""
    lines = []
    for case in TARGETS:
        told = contest.accounts.get(f"{case}-auto")
        if told and told["shares"]:
            shares = [100 * rows[SLOW] / sum(rows) for rows in told["shares"][:_STEPS_SHOWN]]
            words = "slowed" if case == "slowed" else "equal replicas"
            points = tuple((float(step), share) for step, share in enumerate(shares, 1))
            lines.append(Line(label=words, points=points, ours=True, dotted=case == "equal"))
    return Lines(
        title=f"share of replica {SLOW}",
        note="% of the rows, by step",
        lines=tuple(lines),
        levels={"even": 50.0, "ideal": 100 / (1 + contest.slowdown)},
    )
