"""One long training whose worker processes are killed at random: a part of ``make chaos``.

A random worker gets a random fault at a random named point or at a random moment, over and over.
Beside it the same training runs undisturbed; the two must have the same bits after each fault.
``python -m benchmarks recovery`` tells how long a recovery takes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import command
from tests.chaos.course import DEADLINE_S, Course
from tests.chaos.saboteur import MODULE_POINTS, POINTS, Order

SIGNALS = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "terminate": signal.SIGTERM,
    "stop": signal.SIGSTOP,
}
UNTIL_NOTICED = 3  # updates
WORKERS = 2
TIMEOUT_S = 3.0  # after which a worker counts as hung
DEEDS = ["kill"] * 4 + ["segfault"] * 3 + ["terminate"] * 2 + ["stop"]


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has left
        os.kill(pid, number)


class Soak:
    """Commits faults against one of two trainings, one fault after another."""

    def __init__(self, course: Course, seed: int) -> None:
        self.course = course
        self.faults: Counter[str] = Counter()
        self.seconds: list[float] = []  # of each update
        self._random = random.Random(seed)

    def commit_one(self) -> None:
        """Let one worker die or hang; return when that was noticed and the bits were compared."""
        before = self.faults.total()
        while self.faults.total() == before:
            self._try_one()
            self.course.compare()

    def _try_one(self) -> None:
        deed = self._random.choice(DEEDS)
        worker = self._random.randrange(self.course.disturbed.replicas)
        self.course.disturbed.lost.clear()
        if self._random.random() < 0.5:
            self._commit_at_a_point(worker, deed)
        else:
            self._commit_at_a_moment(worker, deed)

    def _commit_at_a_point(self, worker: int, deed: str) -> None:
        point = self._random.choice([*POINTS[1:], *MODULE_POINTS])
        self.course.orders.give(worker, Order(point, deed, self._random.randint(1, 4)))
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._is_lost(worker):
            assert time.monotonic() < deadline_s, f"no {deed} at {point} was noticed"
            self.step()
        self.course.orders.withdraw()
        self.faults[f"{deed}, at a point"] += 1

    def _commit_at_a_moment(self, worker: int, deed: str) -> None:
        while not self.course.are_all_there():
            self.step()
        pid = self.course.worker(worker).pid
        delay_s = self._random.uniform(0.0, 1.2) * statistics.median(self.seconds[-50:])
        strike = threading.Timer(delay_s, send, (pid, SIGNALS[deed]))
        strike.start()
        while strike.is_alive():
            self.step()
        for _ in range(UNTIL_NOTICED):
            self.step()
        if self._is_lost(worker):  # else it was leaving: all are forked again for each epoch
            self.faults[f"{deed}, at a moment"] += 1

    def _is_lost(self, worker: int) -> bool:
        return any(lost.worker == worker for lost in self.course.disturbed.lost)

    def step(self) -> None:
        start_s = time.monotonic()
        self.course.disturbed.step()
        self.seconds.append(time.monotonic() - start_s)
        self.course.undisturbed.step()


@dataclass(frozen=True)
class Result:
    """What the faults have come to: how many of each kind, and the seconds of each update."""

    faults: Counter[str]
    seconds: list[float]

    def __str__(self) -> str:
        kinds = "".join(f"{number:5} {kind}\n" for kind, number in sorted(self.faults.items()))
        deadly_s = [s for s in self.seconds if s < TIMEOUT_S]
        return (
            f"{kinds}{self.faults.total()} faults in {len(self.seconds)} updates, bitwise equal to "
            f"those of the undisturbed training; longest update {max(self.seconds):.2f} s, "
            f"longest without a worker that hangs {max(deadly_s):.2f} s"
        )


def soak(faults: int, seed: int, progress: command.Progress = lambda _: None) -> Result:
    """Commit so many faults; fail where a bit differs after one."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Course(Path(folder), WORKERS, TIMEOUT_S) as course,
    ):
        course.warm_up()
        soaked = Soak(course, seed)
        soaked.step()
        for number in range(faults):
            soaked.commit_one()
            progress(number + 1)
        return Result(soaked.faults, soaked.seconds)


if __name__ == "__main__":
    command.run(soak, faults="kills", number=200)
