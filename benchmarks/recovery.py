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
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

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
from benchmarks.report import OUT, Names, Out, Row, Run, Sheet, read_names
from benchmarks.step import StepJob, plain_step, use_loopback
from phalanx.clock import now_s, pause

_MODEL = MODELS["mlp"]
_WORKERS = 2
_WARMUP_STEPS = 5
_ORDINARY_STEPS = 60  # undisturbed, at the beginning
_SETTLED_STEPS = 10  # in a row with all workers, before one is killed
_MARK = "step:"  # before what a contestant reports

TITLES = {"processes": "worker\nprocesses", "ranks": "elastic\nranks", "launch": "phalanx\nlaunch"}


# -- in a contestant's processes ---------------------------------------------------------------


class Beat(NamedTuple):
    """A step that is done."""

    stop_s: float  # by the clock that all processes of a machine share
    seconds: float
    pids: Sequence[int]  # the processes of the workers that are there


Pids = Callable[[], Sequence[int]]
"""Returns the workers' processes after a step; nothing where another rank reports it."""


@dataclass(frozen=True, kw_only=True)
class RecoveryJob:
    """A contestant, or one of its ranks."""

    contestant: str

    def run(self) -> None:
        """Train until nobody listens, and report each step."""
        answers = claim_stdout()
        with ExitStack() as stack:
            step, pids_of_step = CONTESTANTS[self.contestant](stack)
            while True:
                started_s = now_s()
                step()
                stop_s = now_s()
                if pids := pids_of_step():
                    beat = Beat(stop_s, stop_s - started_s, pids)
                    print(_MARK, json.dumps(beat), file=answers, flush=True)


def _open_trainer(stack: ExitStack) -> tuple[Step, Pids]:
    """Train with worker processes."""
    processes = phalanx.Processes(max_failures=None)
    trainer, batch = _trainer(stack, executor=processes, replicas=_WORKERS)
    return lambda: trainer.step(batch), lambda: trainer.worker_pids


def _open_elastic_rank(stack: ExitStack) -> tuple[Step, Pids]:
    """Be a rank that survives the loss of others, or replaces one."""
    pids: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, phalanx.RanksChanged):
            pids[:] = event.pids if event.rank == 0 else []

    trainer, batch = _trainer(stack, executor=phalanx.Ranks(), callbacks=[note])
    trainer.join()
    return lambda: trainer.step(batch), lambda: pids


def _trainer(stack: ExitStack, **options: Any) -> tuple[phalanx.Trainer, Batch]:
    module, batch = _MODEL.make()
    trainer = phalanx.Trainer(module, loss_of, _MODEL.optimizer, microbatches=None, **options)
    return stack.enter_context(trainer), batch


def _open_rank(_: ExitStack) -> tuple[Step, Pids]:
    """Be a rank of plain DDP, which its launcher starts again from the beginning."""
    torch.set_num_threads(1)
    use_loopback("GLOO")
    dist.init_process_group("phalanx")
    rank = dist.get_rank()
    pids = torch.zeros(_WORKERS, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    module, batch = _MODEL.make()
    inputs, targets = (part.chunk(_WORKERS)[rank] for part in batch)
    job = StepJob(model="mlp", workers=_WORKERS)
    step = plain_step(job, DistributedDataParallel(module), (inputs, targets))
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
    options = (f"-n{_WORKERS}", f"{again}={max_restarts}")
    return (sys.executable, "-c", ours, "launch", *options, __file__, plain[-1])


# -- in this process ---------------------------------------------------------------------------


def recovery(
    contestants: Names = "processes,ranks,launch",
    kills: Annotated[int, typer.Option(min=1, help="Workers that are killed.")] = 20,
    out: Out = OUT,
) -> None:
    """Kill workers in mid-step, and time how soon the training continues."""
    run = Run("recovery", out)
    names = read_names("contestants", contestants, CONTESTANTS)
    for name in names:
        run.console.print(f"{TITLES[name]}: {kills} kills".replace("\n", " "))
        child = Child(name, _command(RecoveryJob(contestant=name), kills + 1))
        chance = random.Random(0)
        ordinary: list[float] = []
        after_kills: list[float] = []
        try:
            for _ in range(_WARMUP_STEPS):
                _next(child)
            for _ in range(_ORDINARY_STEPS):
                ordinary.append(_next(child).seconds)
            delay_s = 2 * statistics.median(ordinary)
            for _ in range(kills):
                after_kills.append(_kill_one(child, delay_s, chance))
        except ContestantFailed as error:
            run.failures[name] = str(error)
        finally:
            end([child])
        run.measured[name] = {"ordinary_s": ordinary, "after_kills_s": after_kills}
    run.sheets.append(_sheet(names, run.measured, kills))
    run.publish()


def _kill_one(child: Child, delay_s: float, chance: random.Random) -> float:
    """Kill a worker; return the seconds from then to the end of the step that it disturbed.

    Raises:
        ContestantFailed: It does not continue.
    """
    before = _settle(child)
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
        _, mark, beat = line.partition(_MARK.encode())
        if mark:
            return Beat(*json.loads(beat))


def _settle(child: Child) -> Sequence[int]:
    """Wait until all workers have taken part in some steps; return their processes."""
    steps = 0
    while True:
        beat = _next(child)
        steps = steps + 1 if len(beat.pids) == _WORKERS else 0
        if steps >= _SETTLED_STEPS and not child.is_behind():
            return beat.pids


def _sheet(names: Sequence[str], measured: dict[str, Any], kills: int) -> Sheet:
    columns: list[Row] = []
    for name in names:
        both = measured[name].values()
        medians = (1e3 * statistics.median(each) if each else None for each in both)
        columns.append((*medians, f"{len(measured[name]['after_kills_s'])} of {kills}"))
    labels = ("ordinary step, median", "from kill -9 to the step's end, median", "continued")
    rows = [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    return Sheet("Milliseconds of a step", [TITLES[name] for name in names], rows)


if __name__ == "__main__":  # a launcher's script
    RecoveryJob(**json.loads(sys.argv[1])).run()
