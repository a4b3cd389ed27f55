"""Ranks that survive, killed at random moments: a part of ``make chaos``.

Three ranks of `phalanx launch --rank-restarts` train one model. Over and over one of them, or two,
is killed: in a step, at the end of an epoch, in the evaluation, in a checkpoint, while it starts,
while it waits to be let in. Afterwards one process trains the same; all bits must be the same.

    rank 0   ── step ── step ── killed    started ── let in ── step ─ ...
    rank 1   ── step ── step ── again ── step ── step ── step ── step ─ ...
    rank 2   ── step ── step ── again ── step ── step ── step ── killed
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.ipc import wait_until
from tests.chaos import command
from tests.contracts.test_executors_same_bits import adamw, made, schedule

RANKS = 3
ROWS, BATCH = 65, 13
STEPS_A_KILL = 60  # more than are done between two kills, as a rule
LAST_STEPS = 10  # that begin when all kills are done
LONGEST_LIFE_S = 0.5  # of all ranks together
DEADLINE_S = 600.0  # until all are together again, on a busy machine
TRAINED, CAME, CHANGED, STARTED, DIGEST = "trained", "came", "changed", "started", "digest"


# --- in the ranks ---------------------------------------------------------------------------------


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def train(
    executor: Any,
    epochs: int,
    checkpoint: Path,
    note: Callable[[phalanx.Trainer, object], None] = lambda _, __: None,
) -> str:
    """Train, and return a digest of all that came of it."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(ROWS, 3, 9), torch.randint(0, 5, (ROWS,)))
    last: list[phalanx.EpochDone] = []

    def tell(event: object) -> None:
        note(trainer, event)
        if isinstance(event, phalanx.EpochDone):
            last[:] = [event]
            if event.epoch % 3 == 1:
                trainer.save(checkpoint)

    trainer = phalanx.Trainer(
        made(),
        nn.functional.cross_entropy,
        adamw,
        executor=executor,
        replicas=1,
        microbatches=6,
        seed=7,
        clip_norm=0.5,
        scheduler=schedule,
        scheduler_interval="step",
        metrics={"right": right},
        callbacks=[tell],
    )
    with trainer:
        trainer.fit(
            DataLoader(data, BATCH, shuffle=True), epochs=epochs, validate=DataLoader(data, 40)
        )
        found = hashlib.sha256()
        for name, value in trainer.module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
        for index, state in sorted(trainer.optimizer.state_dict()["state"].items()):
            for name, value in sorted(state.items()):
                found.update(f"{index}.{name}".encode() + value.contiguous().numpy().tobytes())
        said = [trainer.steps, last[0].train, last[0].validation, trainer.scheduler.get_last_lr()]
        found.update(json.dumps(said).encode())
    return found.hexdigest()


class Diary:
    """A file that all ranks append lines to, each at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.lines: list[list[Any]] = []

    def write(self, kind: str, *more: object) -> None:
        line = json.dumps([kind, time.monotonic(), int(os.environ["RANK"]), os.getpid(), *more])
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def read(self) -> list[list[Any]]:
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


def be_a_rank(folder: Path, epochs: int) -> None:
    """Train as one of the ranks, which run on only as they are all together again."""
    diary = Diary(folder / "diary")
    diary.write(STARTED)
    present = 0

    def note(trainer: phalanx.Trainer, event: object) -> None:
        nonlocal present
        if isinstance(event, phalanx.RanksChanged):
            present = len(event.ranks)
            diary.write(CHANGED, event.step, sorted(event.pids), sorted(event.lost))
        if not isinstance(event, phalanx.StepDone):
            return
        elastic = trainer._choice.elastic
        assert elastic is not None
        left = epochs * ROWS // BATCH - event.step
        # They wait where somebody is missing, now and then, and where the kills are not done.
        if present < RANKS and event.step % 20 == 0:
            wait_until(lambda: elastic.newcomers_wait, DEADLINE_S)
        if left < LAST_STEPS:
            enough = (folder / "enough").exists
            wait_until(lambda: enough() or elastic.newcomers_wait, DEADLINE_S)

    digest = train(phalanx.Ranks(timeout_s=DEADLINE_S), epochs, folder / "checkpoint", note)
    diary.write(DIGEST, digest)


# --- beside them ----------------------------------------------------------------------------------


@dataclass
class Result:
    """What came of the kills.

    Attributes:
        moments: What was killed, how often.
        steps: How many were done.
        noticed_after_s: From each kill of a rank that trained to the end of the step in which each
            survivor noticed it.
        digests: Of what came of the training, in each rank and in one process.
        wrong: What was not as promised.
        seconds: How long it all took.
    """

    moments: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    noticed_after_s: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        p50_ms, longest_ms = (1e3 * f(self.noticed_after_s) for f in (statistics.median, max))
        return (
            f"{dict(self.moments)} killed of {RANKS} ranks in {self.seconds:.0f} s; {self.steps} "
            f"steps; from a kill to the end of the survivors' step {p50_ms:.0f} ms (p50), "
            f"{longest_ms:.0f} ms (longest)\nweights of each rank and of one process: "
            + " ".join(digest[:16] for digest in self.digests)
        )


def kill_ranks(kills: int, seed: int, progress: command.Progress = lambda _: None) -> Result:
    """Kill so many ranks of one job; fail where something is not as promised."""
    result, chance = Result(), random.Random(seed)
    epochs = -(-(kills * STEPS_A_KILL + 3 * LAST_STEPS) * BATCH // ROWS)
    result.steps = epochs * ROWS // BATCH
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        (folder / "diary").touch()
        with (folder / "output").open("wb") as output:
            job = subprocess.Popen(
                _command(folder, epochs, 2 * kills),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                _kill(job, folder, kills, chance, result, progress)
            finally:
                job.terminate()
                job.wait()
        result.seconds = time.monotonic() - began_s
        alone = train("threads", epochs, folder / "alone")
        digests = [line[4] for line in Diary(folder / "diary").read() if line[0] == DIGEST]
        result.digests = [*digests, alone]
        if set(digests) != {alone}:
            result.wrong.append(f"one process comes to {alone}, the ranks came to {digests}")
        output = (folder / "output").read_text()[-6000:]
    assert not result.wrong, "\n".join([*result.wrong, output])
    return result


def _command(folder: Path, epochs: int, restarts: int) -> list[str]:
    launch = "from phalanx.cli.app import main; main()"
    options = ["launch", "-n", str(RANKS), "--rank-restarts", str(restarts)]
    return [sys.executable, "-c", launch, *options, __file__, "--rank", str(folder), str(epochs)]


def _kill(
    job: subprocess.Popen[bytes],
    folder: Path,
    kills: int,
    chance: random.Random,
    result: Result,
    progress: command.Progress,
) -> None:
    diary = Diary(folder / "diary")
    killed_at_s: dict[int, float] = {}  # by process

    def goes_on(ready: Callable[[], bool]) -> bool:
        if wait_until(lambda: ready() or job.poll() is not None, DEADLINE_S) and ready():
            return True
        result.wrong.append(f"after {len(killed_at_s)} kills: {diary.read()[-8:]}")
        return False

    def together() -> list[int]:
        """Return the processes that train, if they are all there."""
        changes = [line for line in diary.read() if line[0] == CHANGED]
        pids = changes[-1][5] if changes else []
        return pids if len(pids) == RANKS and not killed_at_s.keys() & set(pids) else []

    def kill(pid: int, what: str) -> None:
        killed_at_s[pid] = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        result.moments[what] += 1
        progress(len(killed_at_s))

    def come() -> list[int]:
        """Return processes that have started and do not train yet."""
        known = {pid for line in diary.read() if line[0] == CHANGED for pid in line[5]}
        started = {line[3] for line in diary.lines if line[0] == STARTED}
        return sorted(started - known - killed_at_s.keys())

    while len(killed_at_s) < kills:
        if not goes_on(lambda: bool(together())):
            return
        threading.Event().wait(chance.uniform(0.0, LONGEST_LIFE_S))
        first, second, _ = chance.sample(together(), RANKS)
        kill(first, "one that trains")
        fate = chance.random()
        if len(killed_at_s) < kills and fate < 0.25:
            threading.Event().wait(chance.choice([0.0, chance.uniform(0.0, 0.05)]))
            kill(second, "a second one")
        elif len(killed_at_s) < kills and fate < 0.5:
            if not goes_on(lambda: bool(come())):
                return
            threading.Event().wait(chance.uniform(0.0, 0.1))
            kill(come()[0], "one that comes")
    if not goes_on(lambda: bool(together())):
        return
    (folder / "enough").touch()
    if not goes_on(lambda: job.poll() == 0):
        result.wrong.append(f"the job ended with {job.poll()}")
    for line in diary.read():
        if line[0] == CHANGED and line[6]:
            before = [s for pid, s in killed_at_s.items() if s < line[1] and pid not in line[5]]
            result.noticed_after_s.append(line[1] - max(before))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:  # then the folder, and the epochs
        be_a_rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        command.run(kill_ranks, faults="kills", number=50)
