"""``python -m benchmarks recovery``: how long a step takes in which a worker is killed.

    contestant ──── a line of JSON for each step ────► this process
               ◄─ kill -9, at a random moment, to a ──
                  worker

A contestant trains without pause. When all its workers have taken part in some steps, one of them
is killed, and the time from the kill to the ends of later steps is measured. Contestants run one
after the other, each alone.
"""

from __future__ import annotations

import json
import math
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

TITLES = {
    "processes": "worker\nprocesses",
    "ranks": "elastic\nranks",
    "torchrun": "torchrun\ngloo",
    "launch": "phalanx\nlaunch",
}
_PEERS = {"torchrun"}


# -- in a contestant's processes ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A step that is done.

    Attributes:
        stop_s: When it ended, by the clock that all processes of a machine share.
        seconds: How long it took.
        pids: The workers' processes.
        working: How many of them took part.
        lost: Processes of workers that were lost in it.
        life: How many times all workers were started again before.
    """

    stop_s: float
    seconds: float
    pids: Sequence[int]
    working: int
    lost: Sequence[int] = ()
    life: int = 0

    @classmethod
    def from_line(cls, line: bytes) -> Beat | None:
        """Read a contestant's line, which a launcher may have put the rank before."""
        start = line.find(b'{"stop_s"')
        return None if start < 0 else cls(**json.loads(line[start:]))


Describe = Callable[[], dict[str, Any] | None]
"""Returns the fields of the beat of the last step, or None where another rank tells of it."""


@dataclass(frozen=True, kw_only=True)
class RecoveryJob:
    """A contestant, or one of its ranks."""

    contestant: str
    model: str
    workers: int

    def run(self) -> None:
        """Train until nobody listens, and tell of each step."""
        answers = claim_stdout()
        with ExitStack() as stack:
            step, describe = CONTESTANTS[self.contestant](self, stack)
            while True:
                started_s = now_s()
                step()
                stop_s = now_s()
                fields = describe()
                if fields is not None:
                    beat = Beat(stop_s=stop_s, seconds=stop_s - started_s, **fields)
                    print(json.dumps(asdict(beat)), file=answers, flush=True)


def _open_trainer(job: RecoveryJob, stack: ExitStack) -> tuple[Step, Describe]:
    """Train with worker processes."""
    lost: list[int] = []
    shares: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, phalanx.WorkerLost):
            lost.append(event.pid)
        if isinstance(event, phalanx.StepDone):
            shares[:] = event.shares

    def describe() -> dict[str, Any]:
        working = sum(rows > 0 for rows in shares)
        fields = {"pids": trainer.worker_pids, "working": working, "lost": tuple(lost)}
        lost.clear()
        return fields

    processes = phalanx.Processes(max_failures=None)
    trainer, batch = _trainer(job, stack, note, executor=processes, replicas=job.workers)
    return lambda: trainer.step(batch), describe


def _open_elastic_rank(job: RecoveryJob, stack: ExitStack) -> tuple[Step, Describe]:
    """Be a rank that survives the loss of others, or replaces one."""
    changes: list[phalanx.RanksChanged] = []
    pids: dict[int, int] = {}
    is_first = False

    def note(event: object) -> None:
        if isinstance(event, phalanx.RanksChanged):
            changes.append(event)

    def describe() -> dict[str, Any] | None:
        nonlocal pids, is_first
        lost: list[int] = []
        if changes:
            [now] = changes
            lost = [pids[rank] for rank in now.lost if rank in pids]
            pids = dict(zip(now.ranks, now.pids, strict=True))
            is_first = now.rank == 0
            changes.clear()
        everybody = [pids.get(rank, 0) for rank in range(job.workers)]
        return {"pids": everybody, "working": len(pids), "lost": lost} if is_first else None

    trainer, batch = _trainer(job, stack, note, executor=phalanx.Ranks())
    trainer.join()
    return lambda: trainer.step(batch), describe


def _trainer(
    job: RecoveryJob, stack: ExitStack, note: Callable[[object], None], **options: Any
) -> tuple[phalanx.Trainer, Batch]:
    model = MODELS[job.model]
    module, batch = model.make()
    trainer = phalanx.Trainer(
        module, loss_of, model.optimizer, microbatches=None, callbacks=[note], **options
    )
    return stack.enter_context(trainer), batch


def _open_rank(job: RecoveryJob, _: ExitStack) -> tuple[Step, Describe]:
    """Be a rank of plain DDP, which its launcher starts again from the beginning."""
    torch.set_num_threads(1)
    use_loopback("GLOO")
    dist.init_process_group("phalanx" if job.contestant == "launch" else "gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    pids = torch.zeros(job.workers, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    module, batch = MODELS[job.model].make()
    inputs, targets = (part.chunk(job.workers)[rank] for part in batch)
    what = StepJob(model=job.model, workers=job.workers)
    step = plain_step(what, DistributedDataParallel(module), (inputs, targets))
    fields = {"pids": pids.tolist(), "working": job.workers, "life": life}
    return step, lambda: fields if rank == 0 else None


CONTESTANTS = {
    "processes": _open_trainer,
    "ranks": _open_elastic_rank,
    "torchrun": _open_rank,
    "launch": _open_rank,
}


def _command(job: RecoveryJob, max_restarts: int) -> Command:
    """Return the command line of a contestant."""
    plain = command_of(job)
    if job.contestant in ("launch", "ranks"):
        ours = "from phalanx.cli.app import main; main()"
        again = "--max-restarts" if job.contestant == "launch" else "--rank-restarts"
        options = (f"-n{job.workers}", f"{again}={max_restarts}")
        return (sys.executable, "-c", ours, "launch", *options, __file__, plain[-1])
    if job.contestant == "torchrun":
        return (
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={job.workers}", f"--max-restarts={max_restarts}"),
            *("--no-python", *plain),
        )
    return plain


# -- in this process ---------------------------------------------------------------------------


Kill = dict[str, float]
"""Seconds from a kill to the ends of three steps: that which was running, or the first one after a
restart; that which noticed it, a later one if the victim had done its part; and the first one in
which all workers take part again.
"""


def recovery(
    model: Annotated[str, typer.Option(help="Which model: mlp, cnn or gpt.")] = "mlp",
    kills: Annotated[int, typer.Option(min=0, help="Worker processes that are killed.")] = 20,
    rank_kills: Annotated[int, typer.Option(min=0, help="Elastic ranks that are killed.")] = 20,
    restarts: Annotated[
        int, typer.Option(min=0, help="Ranks of torchrun and `phalanx launch`, which restart.")
    ] = 5,
    workers: Annotated[int, typer.Option(min=2, help="Worker processes, or ranks.")] = 2,
    seed: Annotated[int, typer.Option(help="Chooses the victims, and the moments.")] = 0,
    out: Out = OUT,
) -> None:
    """Kill workers in mid-step, and time how soon the training continues.

    With 0 kills a contestant is left out. That a peer does not continue is a result, no error.
    """
    read_names("model", model, MODELS)
    run = Run("recovery", out)
    num_kills = {"processes": kills, "ranks": rank_kills, "torchrun": restarts, "launch": restarts}
    done: dict[str, list[Kill]] = {}
    for name in filter(num_kills.get, num_kills):
        run.console.print(f"{TITLES[name]}: {num_kills[name]} kills".replace("\n", " "))
        job = RecoveryJob(contestant=name, model=model, workers=workers)
        child = Child(name, _command(job, num_kills[name] + 1))
        ordinary: list[float] = []
        done[name] = []
        try:
            _disturb(child, num_kills[name], random.Random(seed), ordinary, done[name])
        except ContestantFailed as error:
            run.failures[name] = str(error)
        finally:
            end([child])
        run.measured[name] = {"ordinary_s": ordinary, "kills": done[name]}
    run.sheets.append(_sheet(run.measured, done, num_kills))
    run.publish(excused=_PEERS)


def _disturb(
    child: Child,
    num_kills: int,
    chance: random.Random,
    ordinary: list[float],
    done: list[Kill],
) -> None:
    """Kill one worker after the other; add to the seconds of ordinary steps, and to the kills.

    Raises:
        ContestantFailed: It does not continue.
    """
    for number in range(_WARMUP_STEPS + _ORDINARY_STEPS):
        beat = _next(child)
        if number >= _WARMUP_STEPS:
            ordinary.append(beat.seconds)
    for _ in range(num_kills):
        before = _settle(child)
        pause(chance.uniform(0.0, 2 * statistics.median(ordinary)))
        victim = chance.choice(before.pids)
        killed_s = now_s()
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        done.append(_watch(child, before, victim, killed_s))


def _next(child: Child) -> Beat:
    while True:
        [line] = hear([child])
        beat = Beat.from_line(line)
        if beat is not None:
            return beat


def _settle(child: Child) -> Beat:
    """Wait until all workers have taken part in some steps; return the last of these."""
    steps = 0
    while True:
        beat = _next(child)
        steps = steps + 1 if beat.working == len(beat.pids) and not beat.lost else 0
        if steps >= _SETTLED_STEPS and not child.is_behind():
            return beat


def _watch(child: Child, before: Beat, victim: int, killed_s: float) -> Kill:
    """Follow the steps after a kill until all workers take part again."""
    running_s = noticed_s = None
    while True:
        beat = _next(child)
        if beat.stop_s < killed_s:
            continue
        after_s = beat.stop_s - killed_s
        restarted = beat.life > before.life
        if running_s is None and not restarted:
            running_s = after_s
        if noticed_s is None and (restarted or victim in beat.lost):
            noticed_s = after_s
        if noticed_s is not None and beat.working == len(beat.pids) and victim not in beat.pids:
            # A restart loses the running step; a survivor may still have told of one.
            running = noticed_s if restarted or running_s is None else running_s
            words = ("the step that was running", "the step that noticed it", "all workers back")
            return dict(zip(words, (running, noticed_s, after_s), strict=True))


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least ``percent`` % of ``values`` do not exceed.

    Example:
        >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 99)
        (2.0, 4.0)
    """
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def _sheet(
    measured: dict[str, Any], done: dict[str, list[Kill]], num_kills: dict[str, int]
) -> Sheet:
    names = [name for name in done if done[name]]
    medians = (statistics.median(measured[name]["ordinary_s"]) for name in names)
    rows: list[Row] = [
        ("ordinary step, median", *(1e3 * median_s for median_s in medians)),
        ("continued after a kill", *(f"{len(done[name])} of {num_kills[name]}" for name in names)),
    ]
    for label in done[names[0]][0] if names else ():
        for percent in (50, 99):
            seconds = ([kill[label] for kill in done[name]] for name in names)
            cells = (1e3 * percentile(each, percent) for each in seconds)
            rows.append((f"{label}, p{percent}", *cells))
    return Sheet("ms from kill -9 to the end of", [TITLES[name] for name in names], rows)


if __name__ == "__main__":  # a launcher's script
    RecoveryJob(**json.loads(sys.argv[1])).run()
