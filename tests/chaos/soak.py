"""One long training whose worker processes are killed at random: ``make chaos N=200``.

A random worker gets a random fault at a random named point or at a random moment, over and over.
Beside it the same training runs undisturbed; the two must have the same bits after each fault.
Exits with 1 if they have not. ``python -m benchmarks recovery`` tells how long a recovery takes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.chaos.course import DEADLINE_S, Course, Watched
from tests.chaos.saboteur import MODULE_POINTS, POINTS, Order

SIGNALS = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "terminate": signal.SIGTERM,
    "stop": signal.SIGSTOP,
}
UNTIL_NOTICED = 3  # updates
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


def digest(watched: Watched) -> str:
    found = hashlib.sha256(repr(watched.losses).encode())
    for value in watched.trainer.module.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout-s", type=float, default=3.0, help="after which a worker counts as hung"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    console = Console()
    with (
        tempfile.TemporaryDirectory() as folder,
        Course(Path(folder), options.workers, options.timeout_s) as course,
        console.status("training") as status,
    ):
        course.warm_up()
        soak = Soak(course, options.seed)
        soak.step()
        try:
            for count in range(options.kills):
                status.update(f"fault {count} of {options.kills}")
                soak.commit_one()
        except AssertionError as error:
            console.print(f"after {soak.faults.total()} faults: {error}", style="red")
        for kind, number in sorted(soak.faults.items()):
            console.print(f"{number:5} {kind}")
        deadly_s = [s for s in soak.seconds if s < options.timeout_s]
        console.print(
            f"{soak.faults.total()} faults in {len(soak.seconds)} updates (seed {options.seed}, "
            f"{options.workers} workers); longest update {max(soak.seconds):.2f} s, "
            f"longest without a worker that hangs {max(deadly_s):.2f} s"
        )
        found, expected = digest(course.disturbed), digest(course.undisturbed)
        is_same = found == expected and soak.faults.total() == options.kills
        console.print(f"disturbed:   {found}\nundisturbed: {expected}")
        console.print("the same bits" if is_same else "DIFFERENT BITS", style="bold")
        return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
