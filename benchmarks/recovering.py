"""What the contestants of ``make bench-recovery`` run: a training that goes on until it is told.

Each prints one line of JSON per step to its stdout, with when it ended by the clock that all
processes of a machine share, and who is at work; ``recovery`` reads them and kills:

    {"stop_s": 81.25, "seconds": 0.012, "life": 0, "working": 2, "pids": [71, 72], "lost": []}

A contestant ends with its stdout's reader.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.contestants import build, loss_of, plain_step, sgd, use_loopback
from benchmarks.processes import Command, claim_stdout, command_of
from phalanx.clock import now_s


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

    contestant: str
    model: str
    workers: int

    def run(self) -> None:
        """Be the contestant, or one of its ranks."""
        answers = claim_stdout()

        def tell(beat: Beat) -> None:
            try:
                print(json.dumps(asdict(beat)), file=answers, flush=True)
            except BrokenPipeError:
                os._exit(0)

        CONTESTANTS[self.contestant](self, tell)


def _run_trainer(job: RecoveryJob, tell: Callable[[Beat], None]) -> None:
    """Train with `Trainer` and worker processes."""
    module, batch = build(job.model)
    lost: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, phalanx.WorkerLost):
            lost.append(event.pid)

    with phalanx.Trainer(
        module,
        loss_of,
        sgd,
        microbatches=None,
        replicas=job.workers,
        executor=phalanx.Processes(max_failures=None),
        callbacks=[note],
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


def _run_rank(job: RecoveryJob, tell: Callable[[Beat], None]) -> None:
    """Be a rank that a launcher has started: plain DDP, from the beginning each time."""
    torch.set_num_threads(1)
    use_loopback("GLOO")
    dist.init_process_group("phalanx" if job.contestant == "launch" else "gloo")
    _train_plainly(job, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), tell)


def _train_plainly(job: RecoveryJob, life: int, tell: Callable[[Beat], None]) -> None:
    """Train with DDP, in the group that there is; its first rank tells of each step."""
    pids = torch.zeros(job.workers, dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    module, (inputs, targets) = build(job.model)
    inputs, targets = (part.chunk(job.workers)[dist.get_rank()] for part in (inputs, targets))
    step = plain_step(DistributedDataParallel(module), (inputs, targets))
    while True:
        started_s = now_s()
        step()
        stop_s = now_s()
        if dist.get_rank() == 0:
            tell(
                Beat(
                    stop_s=stop_s,
                    seconds=stop_s - started_s,
                    life=life,
                    working=job.workers,
                    pids=tuple(pids.tolist()),
                )
            )


def _run_survivor(job: RecoveryJob, tell: Callable[[Beat], None]) -> None:
    """Be a rank that survives the loss of others, or comes in the place of one."""
    module, batch = build(job.model)
    changes: list[phalanx.RanksChanged] = []

    def note(event: object) -> None:
        if isinstance(event, phalanx.RanksChanged):
            changes.append(event)

    with phalanx.Trainer(
        module,
        loss_of,
        sgd,
        microbatches=None,
        executor=phalanx.Ranks(),
        callbacks=[note],
    ) as trainer:
        trainer.join()
        pids: dict[int, int] = {}
        first = False
        while True:
            lost = []
            started_s = now_s()
            trainer.step(batch)
            stop_s = now_s()
            if changes:
                lost = [pids[rank] for rank in changes[0].lost if rank in pids]
                [now] = changes
                pids = dict(zip(now.ranks, now.pids, strict=True))
                first = now.rank == 0
                changes.clear()
            if first:
                tell(
                    Beat(
                        stop_s=stop_s,
                        seconds=stop_s - started_s,
                        life=0,
                        working=len(pids),
                        pids=tuple(pids.get(rank, 0) for rank in range(job.workers)),
                        lost=tuple(lost),
                    )
                )


def _run_ray(job: RecoveryJob, tell: Callable[[Beat], None]) -> None:
    """Be the driver of Ray Train, which starts all its workers anew when one is lost."""
    import ray.train  # an extra: `ray[train]`
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=job.workers + 1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        os.mkfifo(told)
        config = {"job": asdict(job), "folder": folder}
        training = TorchTrainer(
            _work_for_ray,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=job.workers),
            run_config=ray.train.RunConfig(
                storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=-1)
            ),
        )
        threading.Thread(target=training.fit, daemon=True).start()
        with open(os.open(told, os.O_RDWR)) as lines:  # for both: no end when a writer is killed
            for line in lines:
                beat = Beat.from_line(line.encode())
                if beat is not None:
                    tell(beat)


def _work_for_ray(config: dict[str, Any]) -> None:
    """Be a worker of Ray Train: plain DDP, from the beginning each time."""
    job, folder = RecoveryJob(**config["job"]), Path(config["folder"])
    rank = dist.get_rank()
    life = len(list(folder.glob("life-*")))
    dist.barrier()
    if rank == 0:
        (folder / f"life-{life}").touch()
    with (folder / "told").open("w") as answers:
        _train_plainly(
            job, life, lambda beat: print(json.dumps(asdict(beat)), file=answers, flush=True)
        )


CONTESTANTS: dict[str, Callable[[RecoveryJob, Callable[[Beat], None]], None]] = {
    "processes": _run_trainer,
    "torchrun": _run_rank,
    "launch": _run_rank,
    "ranks": _run_survivor,
    "ray": _run_ray,
}


def is_available(contestant: str) -> bool:
    """Whether what a contestant needs is installed."""
    return contestant != "ray" or all(map(importlib.util.find_spec, ("ray", "pandas", "pyarrow")))


def command(job: RecoveryJob, *, max_restarts: int) -> Command:
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


if __name__ == "__main__":  # a launcher's script
    RecoveryJob(**json.loads(sys.argv[1])).run()
