"""``make bench-balance``: what balanced workloads gain beside a slow replica, and cost without.

Ten contestants: a `Trainer` and a `DataParallel`, each with one replica slowed (even, balanced and
ideal shares) and with equal replicas (even and balanced shares). How long the slow replica has to
wait for a row is measured first, so that it is as many times slower as was asked for.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.arena import Arena, Pace, compete
from benchmarks.balance_report import Contest, as_json, balance_table, draw_balance
from benchmarks.contestants import check_model
from benchmarks.machine import describe_machine
from benchmarks.slowed import Job, entrant, read_account
from benchmarks.step import introduce, turn_progress
from phalanx.cli.console import make_console
from phalanx.errors import ConfigError, PeerLost

__all__ = ["balance"]

DEFAULT_OUT = Path("out/bench-balance")
CONTAINERS = ("trainer", "dataparallel")
SETTLING_STEPS = 10  # in which balanced shares must be found
_CALIBRATION_STEPS = 24


def balance(
    model: Annotated[str, typer.Option(help="Which model: mlp, cnn or gpt.")] = "mlp",
    slowdown: Annotated[
        float, typer.Option(help="How many times slower the slow replica is.")
    ] = 3.0,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps that count, at least, of each contestant.")
    ] = 60,
    out: Annotated[
        Path, typer.Option(help="Folder for balance.json and balance.png; older ones are replaced.")
    ] = DEFAULT_OUT,
) -> None:
    """Time a training step on two unequal replicas: even, balanced and ideal shares.

    The same without a slow replica. Contestants take turns in one run, each in a process of its
    own. A missed target is marked and is no error; a contestant that failed is: exit code 1.
    """
    check_model(model, "--model")
    if not slowdown > 1:
        raise ConfigError(f"`--slowdown` must be above 1, but is {slowdown!r}.")
    console = make_console()
    machine, pace = describe_machine(), _pace_for(steps)
    introduce(console, machine)
    with tempfile.TemporaryDirectory() as folder:
        row_s = _seconds_per_row(model, Path(folder))
        console.print(
            f"{model}: a row takes a replica {1e6 * row_s:.0f} µs; the slow one waits "
            f"{1e6 * row_s * (slowdown - 1):.0f} µs more for each."
        )
        jobs = _jobs(model, slowdown, row_s, Path(folder))
        contest = _hold(console, jobs, pace, model=model, slowdown=slowdown, row_s=row_s)
    console.print(balance_table(contest))
    for name, cause in contest.outcome.failures.items():
        console.print(f"{name} failed.", style="red")
        console.print(cause)
    out.mkdir(parents=True, exist_ok=True)
    (out / "balance.json").write_text(as_json(contest, machine, pace), encoding="utf-8")
    draw_balance(contest, machine, out / "balance.png")
    console.print(f"Wrote {out / 'balance.json'} and {out / 'balance.png'}.")
    if contest.outcome.failures:
        raise typer.Exit(1)


def _pace_for(steps: int) -> Pace:
    paced = Pace.for_steps(steps)
    return Pace(rounds=paced.rounds, settle_s=0.0, warmup=SETTLING_STEPS)  # it sleeps, mostly


def _seconds_per_row(model: str, folder: Path) -> float:
    """Measure what a row takes a replica that has another beside it.

    Raises:
        PeerError: The process that measures it has failed or is silent.
    """
    account = folder / "calibration"
    job = Job(container="trainer", workloads="auto", model=model, slow_s=0.0, account=str(account))
    with Arena([entrant("calibration", job)]) as arena:
        arena.greet("calibration")
        arena.run("calibration", _CALIBRATION_STEPS)
    told = read_account(account)
    if told is None:
        raise PeerLost("The calibration must write what it has measured, but did not.", rank=0)
    late = told.decisions[_CALIBRATION_STEPS // 3 :]
    return statistics.median(
        seconds for each in late for seconds in each.seconds_per_row if seconds is not None
    )


def _jobs(model: str, slowdown: float, row_s: float, folder: Path) -> dict[str, Job]:
    """Return the contestants by name: container, whether a replica is slowed, and the shares."""
    splits: dict[str, dict[str, str | tuple[float, ...] | None]] = {
        "slowed": {"even": None, "auto": "auto", "ideal": (slowdown, 1.0)},
        "equal": {"even": None, "auto": "auto"},
    }
    return {
        (name := f"{container}-{case}-{split}"): Job(
            container=container,
            workloads=workloads,
            model=model,
            slow_s=(slowdown - 1) * row_s if case == "slowed" else 0.0,
            account=str(folder / name),
        )
        for container in CONTAINERS
        for case, workloads_by_split in splits.items()
        for split, workloads in workloads_by_split.items()
    }


def _hold(
    console: Console,
    jobs: dict[str, Job],
    pace: Pace,
    *,
    model: str,
    slowdown: float,
    row_s: float,
) -> Contest:
    entrants = [entrant(name, job) for name, job in jobs.items()]
    if not console.is_terminal:
        console.print(f"{len(entrants)} contestants, {pace.rounds} rounds")
    with turn_progress(console, len(entrants) * (pace.rounds + 2)) as show:
        outcome = compete(entrants, pace, lambda name, doing: show(f"{doing} · {name}"))
    accounts = {name: read_account(Path(job.account)) for name, job in jobs.items()}
    return Contest(
        model=model,
        slowdown=slowdown,
        seconds_per_row=row_s,
        outcome=outcome,
        accounts={name: told for name, told in accounts.items() if told is not None},
    )
