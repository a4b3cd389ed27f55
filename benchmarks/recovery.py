"""``make bench-recovery``: how long a step takes in which a worker is killed.

    contestant ──── a line per step ────► this process
               ◄─ kill -9, at a random ─
                  moment, to a worker

A contestant trains without pause. When all its workers have been at work for some steps, one of
them is killed; what is measured is the time from the kill to the ends of later steps. The
contestants run one after the other, each alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from benchmarks.command import Aims, Model, Out, begin, command_line, progress
from benchmarks.contestants import check_model
from benchmarks.machine import Machine
from benchmarks.old_report import Column, Judged, Report, Row, Sheet, headline, publish
from benchmarks.panels import Bar, Bars
from benchmarks.processes import Child, Command, end, hear
from benchmarks.recovering import Beat, RecoveryJob, command, is_available
from phalanx.clock import now_s, pause
from phalanx.errors import PeerError

_PATIENCE_S = 180.0  # for any line of a contestant
_GOODBYE_S = 20.0
_SETTLED_STEPS = 10  # in a row with all workers, before one is killed
_ORDINARY_STEPS = 60  # undisturbed, at the beginning
_WARMUP_STEPS = 5
_SIGKILL = 9

TITLES = {
    "processes": "worker processes",
    "torchrun": "torchrun, gloo",
    "launch": "phalanx launch",
    "ranks": "ranks that survive",
    "ray": "Ray Train, gloo",
}
_PEERS = {"torchrun", "ray"}
JUDGED = "processes"
EXTRA_S = {50: 0.1, 99: 0.5}  # by percentile: beyond an ordinary step, at most
_FIELDS = {
    "running_s": "step that was running",
    "noticed_s": "step that noticed it",
    "whole_s": "all workers back",
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What followed a kill, in seconds from it.

    Attributes:
        running_s: To the end of the step that was running; where that step was lost, to the end of
            the first one after the restart.
        noticed_s: To the end of the step in which the loss was noticed. It is a later step if the
            victim had done its part of the running one.
        whole_s: To the end of the first step that has all workers at work again.
    """

    running_s: float
    noticed_s: float
    whole_s: float


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """What was measured of one contestant.

    Attributes:
        name: Which.
        ordinary_s: Its ordinary steps.
        kills: Those after which it went on, at least one.
        num_asked: How many workers were to be killed.
        end: Why it did not go on after a further one.
    """

    name: str
    ordinary_s: tuple[float, ...]
    kills: tuple[Kill, ...]
    num_asked: int
    end: str = ""

    @property
    def median_s(self) -> float:
        """The ordinary step."""
        return statistics.median(self.ordinary_s)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least ``percent`` % of ``values`` do not exceed.

    Of fewer than 100 values the 99th percentile is the largest.

    Example:
        >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 99)
        (2.0, 4.0)
    """
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def recovery(
    model: Model = "mlp",
    kills: Annotated[int, typer.Option(min=1, help="Workers of Phalanx that are killed.")] = 20,
    rank_kills: Annotated[
        int, typer.Option(min=0, help="Ranks of `executor=Ranks()` that are killed; 0: left out.")
    ] = 20,
    restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Ranks that are killed, of each launcher and Ray; 0 leaves them out."
        ),
    ] = 5,
    workers: Annotated[int, typer.Option(min=2, help="Worker processes, and ranks.")] = 2,
    seed: Annotated[int, typer.Option(help="Of who is killed, and when.")] = 0,
    out: Out = Path("out/bench-recovery"),
    aims: Aims = False,
) -> None:
    """Kill worker processes in mid-step, and time how soon the training goes on.

    Beside it, in the same table, ranks that survive the loss of others, and torchrun over gloo and
    `phalanx launch` over phalanx, both with --max-restarts, and Ray Train with max_failures, on the
    same model. A contestant of ours that failed is an error: exit code 1. A peer's failure, such as
    not to go on after a kill, is a result.
    """
    check_model(model)
    console, machine = begin()
    kills_by_name = {
        "processes": kills,
        "ranks": rank_kills,
        "torchrun": restarts,
        "launch": restarts,
        "ray": restarts,
    }
    if not is_available("ray"):
        console.print("Ray Train is not installed, so it is left out: pip install --group peers.")
        del kills_by_name["ray"]
    results: list[Disturbed] = []
    failures: dict[str, str] = {}
    what = ", ".join(f"{name}: {num_kills} kills" for name, num_kills in kills_by_name.items())
    with progress(console, sum(kills_by_name.values()), what) as show:
        for name, num_kills in kills_by_name.items():
            if not num_kills:
                continue
            job = RecoveryJob(contestant=name, model=model, workers=workers)
            try:
                with Training(name, command(job, max_restarts=num_kills + 1)) as training:
                    results.append(disturb(training, num_kills, random.Random(seed), show))
            except PeerError as error:
                failures[name] = str(error)
            else:
                if results[-1].end:
                    failures[name] = results[-1].end
    again = command_line(
        "recovery",
        model=model,
        kills=kills,
        rank_kills=rank_kills,
        restarts=restarts,
        workers=workers,
        seed=seed,
    )
    report = report_recovery(
        results, failures, machine, again, model=model, workers=workers, seed=seed
    )
    publish(report, console, out, aims=aims, excused=_PEERS)


class Training(Child):
    """A contestant's process, which tells of each of its steps."""

    def __init__(self, name: str, words: Command) -> None:
        super().__init__(words)
        self.name = name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end([self], grace_s=_GOODBYE_S, term=True)

    def next(self) -> Beat:
        """Wait for the next step's line; raises like `hear`."""
        while True:
            [line] = hear(self.name, [self], _PATIENCE_S)
            beat = Beat.from_line(line)
            if beat is not None:
                return beat

    def is_behind(self) -> bool:
        """Whether there are lines that have come already."""
        return self.has_line or bool(select.select([self.answers], [], [], 0.0)[0])


def disturb(
    training: Training,
    num_kills: int,
    chance: random.Random,
    tell: Callable[[str], None] = lambda _: None,
) -> Disturbed:
    """Kill workers of ``training``, one at a time, and return what became of its steps.

    One that does not go on after a kill is killed no more.

    Args:
        chance: Draws who is killed, and when: evenly over two ordinary steps.
        tell: Told before each kill.

    Raises:
        PeerError: It did not go on after the first.
    """
    for _ in range(_WARMUP_STEPS):
        training.next()
    ordinary = [training.next().seconds for _ in range(_ORDINARY_STEPS)]
    median_s = statistics.median(ordinary)
    done: list[Kill] = []
    end = ""
    for number in range(num_kills):
        tell(f"{training.name} · kill {number + 1} of {num_kills}")
        try:
            before = _settle(training)
            pause(chance.uniform(0.0, 2 * median_s))
            victim = chance.choice(before.pids)
            killed_s = now_s()
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, _SIGKILL)
            done.append(_watch(training, before, victim, killed_s))
        except PeerError as error:
            if not done:
                raise
            end = str(error)
            break
    return Disturbed(
        name=training.name,
        ordinary_s=tuple(ordinary),
        kills=tuple(done),
        num_asked=num_kills,
        end=end,
    )


def _settle(training: Training) -> Beat:
    """Wait until all workers have been at work for some steps; return the last of these."""
    steps = 0
    while True:
        beat = training.next()
        steps = steps + 1 if beat.working == len(beat.pids) and not beat.lost else 0
        if steps >= _SETTLED_STEPS and not training.is_behind():
            return beat


def _watch(training: Training, before: Beat, victim: int, killed_s: float) -> Kill:
    """Follow the steps after a kill until all workers are at work again."""
    running_s = noticed_s = None
    while True:
        beat = training.next()
        if beat.stop_s < killed_s:
            continue
        after_s = beat.stop_s - killed_s
        anew = beat.life > before.life
        if running_s is None and beat.life == before.life:
            running_s = after_s
        if noticed_s is None and (anew or victim in beat.lost):
            noticed_s = after_s
        if noticed_s is not None and beat.working == len(beat.pids) and victim not in beat.pids:
            # Of torchrun the running step is lost; a survivor may still have told of one.
            running = noticed_s if anew or running_s is None else running_s
            return Kill(running_s=running, noticed_s=noticed_s, whole_s=after_s)


def report_recovery(
    results: Sequence[Disturbed],
    failures: Mapping[str, str],
    machine: Machine,
    command_again: str,
    *,
    model: str,
    workers: int,
    seed: int,
) -> Report:
    """Return how soon the contestants went on."""
    steps = (1e3 * result.median_s for result in results)
    rows = [Row("ordinary step, median", tuple(steps))]
    rows.append(Row("went on after a kill", tuple(map(_went_on, results))))
    for name, words in _FIELDS.items():
        for percent, extra_s in EXTRA_S.items():
            cells = []
            for result in results:
                times = [getattr(kill, name) for kill in result.kills]
                measured = 1e3 * percentile(times, percent)
                judged = result.name == JUDGED and name == "running_s"
                limit = 1e3 * (result.median_s + extra_s)
                cells.append(Judged(measured, limit) if judged else measured)
            rows.append(Row(f"{words}, p{percent}", tuple(cells), ours=name == "running_s"))
    columns = tuple(Column(TITLES[result.name], "ms") for result in results)
    bars = tuple(
        Bar(
            label=TITLES[result.name],
            parts=(1e3 * result.median_s,),
            dots=tuple(1e3 * kill.running_s for kill in result.kills),
            text=f"went on after {_went_on(result)}",
            ours=result.name == JUDGED,
        )
        for result in results
    )
    note = "ms from kill -9 to the end of the step; bar: an ordinary step"
    return Report(
        name="recovery",
        title="A worker is killed in mid-step",
        command=command_again,
        machine=machine,
        sheets=(Sheet(f"{model}, {workers} workers: time from kill -9", columns, tuple(rows)),),
        panels=(Bars(title="", note=note, bars=bars, log=True),),
        measured={
            "model": model,
            "workers": workers,
            "seed": seed,
            "contestants": [asdict(result) | {"end": headline(result.end)} for result in results],
        },
        failures=failures,
    )


def _went_on(result: Disturbed) -> str:
    return f"{len(result.kills)} of {result.num_asked}"
