"""What the contestants of ``make bench-recovery`` run: a training that goes on until it is told.

Each prints one line of JSON per step to its stdout, with when it ended by the clock that all
processes of a machine share, and who is at work; ``recovery`` reads them and kills:

    {"stop_s": 81.25, "seconds": 0.012, "life": 0, "working": 2, "pids": [71, 72], "lost": []}

A contestant ends with its stdout's reader.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.contestants import build, loss_of
from phalanx.clock import now_s
from phalanx.ipc import die_with_parent

__all__ = ["CONTESTANTS", "Beat", "RecoveryJob", "command", "main"]

_LEARNING_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One step that is done.

    Attributes:
        stop_s: When it ended.
        seconds: How long it took.
        life: How many times all was started anew before.
        working: How many workers did a part of it.
        pids: The workers' processes.
        lost: Those that it lost and was completed without.
    """

    stop_s: float
    seconds: float
    life: int
    working: int
    pids: tuple[int, ...]
    lost: tuple[int, ...] = ()

    @classmethod
    def from_line(cls, line: bytes) -> Beat | None:
        """Read what a contestant has written; None if that is something else.

        A launcher puts the rank before it.
        """
        start = line.find(b'{"stop_s"')
        if start < 0:
            return None
        told = json.loads(line[start:])
        return cls(**{**told, "pids": tuple(told["pids"]), "lost": tuple(told["lost"])})


@dataclass(frozen=True, kw_only=True)
class RecoveryJob:
    """What a contestant trains, with how many workers."""

    model: str
    workers: int


def _run_trainer(job: RecoveryJob, tell: Callable[[Beat], None]) -> None:
    """Train with `Trainer` and worker processes."""
    module, batch = build(job.model)
    lost: list[int] = []
    with phalanx.Trainer(
        module,
        loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=_LEARNING_RATE),
        executor=phalanx.Processes(
            max_failures=None, on_failure=lambda failure: lost.append(failure.pid)
        ),
        replicas=job.workers,
    ) as trainer:
        while True:
            started_s = now_s()
            done = trainer.step(batch)
            stop_s = now_s()
            tell(
                Beat(
                    stop_s=stop_s,
                    seconds=stop_s - started_s,
                    life=0,
                    working=sum(rows > 0 for rows in done.shares),
                    pids=trainer.worker_pids,
                    lost=tuple(lost),
                )
            )
            lost.clear()


def _run_rank(job: RecoveryJob, tell: Callable[[Beat], None], backend: str) -> None:
    """Be a rank that a launcher has started: plain DDP, from the beginning each time."""
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend)
    pids = torch.zeros(job.workers, dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    module, (inputs, targets) = build(job.model)
    inputs, targets = (part.chunk(job.workers)[dist.get_rank()] for part in (inputs, targets))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    while True:
        started_s = now_s()
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        stop_s = now_s()
        if dist.get_rank() == 0:
            tell(
                Beat(
                    stop_s=stop_s,
                    seconds=stop_s - started_s,
                    life=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                    working=job.workers,
                    pids=tuple(pids.tolist()),
                )
            )


CONTESTANTS: dict[str, Callable[[RecoveryJob, Callable[[Beat], None]], None]] = {
    "processes": _run_trainer,
    "torchrun": partial(_run_rank, backend="gloo"),
    "launch": partial(_run_rank, backend="phalanx"),
}


def command(name: str, job: RecoveryJob, *, max_restarts: int) -> tuple[str, ...]:
    """Return the command line of contestant ``name``."""
    program = f"from {__name__} import main; main()"
    start = (sys.executable, "-c", program, name, json.dumps(asdict(job)))
    if name == "launch":
        options = (f"-n{job.workers}", f"--max-restarts={max_restarts}")
        ours = "from phalanx.cli.app import main; main()"
        return (sys.executable, "-c", ours, "launch", *options, __file__, *start[3:])
    if name != "torchrun":
        return start
    return (
        *(sys.executable, "-m", "torch.distributed.run"),
        "--standalone",
        f"--nproc-per-node={job.workers}",
        f"--max-restarts={max_restarts}",
        *("--no-python", *start),
    )


def main() -> None:
    """Be the contestant that the command line describes."""
    name, job = sys.argv[1], RecoveryJob(**json.loads(sys.argv[2]))
    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr; stdout belongs to the lines

    def tell(beat: Beat) -> None:
        try:
            answers.write(json.dumps(asdict(beat)) + "\n")
            answers.flush()
        except BrokenPipeError:
            os._exit(0)

    CONTESTANTS[name](job, tell)


if __name__ == "__main__":  # a launcher's script
    main()
