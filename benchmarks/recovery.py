"""``python -m benchmarks recovery``: how long a step takes in which a worker is killed.

    contestant ──── a line of JSON for each step ────► this process
               ◄─ kill -9, at a random moment, to a ──
                  worker

A contestant trains without pause. When all its workers have taken part in some steps, one of them
is killed, and the time from the kill to the end of the running step is measured, or of the first
step after a restart, which loses the running one. Contestants run one after the other, each alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.contest import (
    Child,
    Command,
    ContestantFailed,
    Step,
    claim_stdout,
    command_of,
    end,
    hear,
)
from benchmarks.models import MODELS, Batch, loss_of
from benchmarks.report import OUT, Out, Row, Run, Sheet, read_names
from benchmarks.step import StepJob, plain_step, use_loopback
from phalanx.clock import now_s, pause

_WARMUP_STEPS = 5
_ORDINARY_STEPS = 60  # undisturbed, at the beginning
_SETTLED_STEPS = 10  # in a row with all workers, before one is killed

TITLES = {"processes": "worker\nprocesses", "ranks": "elastic\nranks", "launch": "phalanx\nlaunch"}


# -- in a contestant's processes ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A step that is done.

    Attributes:
        stop_s: When it ended, by the clock that all processes of a machine share.
        seconds: How long it took.
        pids: The processes of the workers that are there.
    """

    stop_s: float
    seconds: float
    pids: Sequence[int]


Pids = Callable[[], Sequence[int]]
"""Returns the workers' processes after a step; nothing where another rank reports it."""


@dataclass(frozen=True, kw_only=True)
class RecoveryJob:
    """A contestant, or one of its ranks."""

    contestant: str
    model: str
    workers: int

    def run(self) -> None:
        """Train until nobody listens, and report each step."""
        answers = claim_stdout()
        with ExitStack() as stack:
            step, pids_of_step = CONTESTANTS[self.contestant](self, stack)
            while True:
                started_s = now_s()
                step()
                stop_s = now_s()
                if pids := pids_of_step():
                    beat = Beat(stop_s=stop_s, seconds=stop_s - started_s, pids=pids)
                    print(json.dumps(asdict(beat)), file=answers, flush=True)


def _open_trainer(job: RecoveryJob, stack: ExitStack) -> tuple[Step, Pids]:
    """Train with worker processes."""
    processes = phalanx.Processes(max_failures=None)
    trainer, batch = _trainer(job, stack, executor=processes, replicas=job.workers)
    return lambda: trainer.step(batch), lambda: trainer.worker_pids


def _open_elastic_rank(job: RecoveryJob, stack: ExitStack) -> tuple[Step, Pids]:
    """Be a rank that survives the loss of others, or replaces one."""
    pids: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, phalanx.RanksChanged):
            pids[:] = event.pids if event.rank == 0 else []

    trainer, batch = _trainer(job, stack, executor=phalanx.Ranks(), callbacks=[note])
    trainer.join()
    return lambda: trainer.step(batch), lambda: pids


def _trainer(job: RecoveryJob, stack: ExitStack, **options: Any) -> tuple[phalanx.Trainer, Batch]:
    model = MODELS[job.model]
    module, batch = model.make()
    trainer = phalanx.Trainer(module, loss_of, model.optimizer, microbatches=None, **options)
    return stack.enter_context(trainer), batch


def _open_rank(job: RecoveryJob, _: ExitStack) -> tuple[Step, Pids]:
    """Be a rank of plain DDP, which its launcher starts again from the beginning."""
    torch.set_num_threads(1)
    use_loopback("GLOO")
    dist.init_process_group("phalanx")
    rank = dist.get_rank()
    pids = torch.zeros(job.workers, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    module, batch = MODELS[job.model].make()
    inputs, targets = (part.chunk(job.workers)[rank] for part in batch)
    what = StepJob(model=job.model, workers=job.workers)
    step = plain_step(what, DistributedDataParallel(module), (inputs, targets))
    reported = pids.tolist() if rank == 0 else []
    return step, lambda: reported


CONTESTANTS = {"processes": _open_trainer, "ranks": _open_elastic_rank, "launch": _open_rank}


def _command(job: RecoveryJob, max_restarts: int) -> Command:
    """Return the command line of a contestant."""
    plain = command_of(job)
    if job.contestant == "processes":
        return plain
    ours = "from phalanx.cli.app import main; main()"
    again = "--max-restarts" if job.contestant == "launch" else "--rank-restarts"
    options = (f"-n{job.workers}", f"{again}={max_restarts}")
    return (sys.executable, "-c", ours, "launch", *options, __file__, plain[-1])


# -- in this process ---------------------------------------------------------------------------


def recovery(
    model: Annotated[str, typer.Option(help="Which model: mlp, cnn or gpt.")] = "mlp",
    kills: Annotated[int, typer.Option(min=0, help="Worker processes that are killed.")] = 20,
    rank_kills: Annotated[int, typer.Option(min=0, help="Elastic ranks that are killed.")] = 20,
    restarts: Annotated[
        int, typer.Option(min=0, help="Ranks of `phalanx launch`, which restarts all.")
    ] = 5,
    workers: Annotated[int, typer.Option(min=2, help="Worker processes, or ranks.")] = 2,
    seed: Annotated[int, typer.Option(help="Chooses the victims, and the moments.")] = 0,
    out: Out = OUT,
) -> None:
    """Kill workers in mid-step, and time how soon the training continues; 0 leaves one out."""
    read_names("model", model, MODELS)
    run = Run("recovery", out)
    num_kills = {"processes": kills, "ranks": rank_kills, "launch": restarts}
    names = [name for name, number in num_kills.items() if number]
    for name in names:
        run.console.print(f"{TITLES[name]}: {num_kills[name]} kills".replace("\n", " "))
        job = RecoveryJob(contestant=name, model=model, workers=workers)
        child = Child(name, _command(job, num_kills[name] + 1))
        chance = random.Random(seed)
        ordinary: list[float] = []
        after_kills: list[float] = []
        try:
            for _ in range(_WARMUP_STEPS):
                _next(child)
            for _ in range(_ORDINARY_STEPS):
                ordinary.append(_next(child).seconds)
            delay_s = 2 * statistics.median(ordinary)
            for _ in range(num_kills[name]):
                after_kills.append(_kill_one(child, workers, delay_s, chance))
        except ContestantFailed as error:
            run.failures[name] = str(error)
        finally:
            end([child])
        run.measured[name] = {"ordinary_s": ordinary, "after_kills_s": after_kills}
    run.sheets.append(_sheet(names, run.measured, num_kills))
    run.publish()


def _kill_one(child: Child, workers: int, delay_s: float, chance: random.Random) -> float:
    """Kill a worker; return the seconds from then to the end of the step that it disturbed.

    Raises:
        ContestantFailed: It does not continue.
    """
    before = _settle(child, workers)
    pause(chance.uniform(0.0, delay_s))
    victim = chance.choice(before)
    killed_s = now_s()
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    running_s = None
    while True:
        beat = _next(child)
        if beat.stop_s < killed_s:
            continue
        after_s = beat.stop_s - killed_s
        if set(before).isdisjoint(beat.pids):  # a restart, which loses the running step
            return after_s
        running_s = after_s if running_s is None else running_s
        if victim not in beat.pids:
            return running_s


def _next(child: Child) -> Beat:
    """Return the next step that a contestant reports; a launcher may put the rank before it."""
    while True:
        [line] = hear([child])
        start = line.find(b'{"stop_s"')
        if start >= 0:
            return Beat(**json.loads(line[start:]))


def _settle(child: Child, workers: int) -> Sequence[int]:
    """Wait until all workers have taken part in some steps; return their processes."""
    steps = 0
    while True:
        beat = _next(child)
        steps = steps + 1 if len(beat.pids) == workers else 0
        if steps >= _SETTLED_STEPS and not child.is_behind():
            return beat.pids


def _sheet(names: Sequence[str], measured: dict[str, Any], num_kills: dict[str, int]) -> Sheet:
    columns: list[Row] = []
    for name in names:
        both = measured[name].values()
        medians = (1e3 * statistics.median(each) if each else None for each in both)
        done = len(measured[name]["after_kills_s"])
        columns.append((*medians, f"{done} of {num_kills[name]}"))
    labels = ("ordinary step, median", "from kill -9 to the step's end, median", "continued")
    rows = [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    return Sheet("Milliseconds of a step", [TITLES[name] for name in names], rows)


if __name__ == "__main__":  # a launcher's script
    RecoveryJob(**json.loads(sys.argv[1])).run()
