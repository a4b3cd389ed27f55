"""One long training whose worker processes are killed at random: ``make chaos N=200``.

A random worker gets a random signal at a random named point or at a random moment, over and over.
Afterwards the same training runs undisturbed; the two must have the same bits. Exits with 1 if they
have not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import phalanx
from phalanx.ipc import fail_points
from tests.chaos.saboteur import MODULE_POINTS, POINTS, REASONS, Order, Orders, Saboteur

_POINTS = [point for point in (*POINTS, *MODULE_POINTS) if point != "born"]
SIGNALS = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "exit": signal.SIGTERM,
    "stop": signal.SIGSTOP,
}
DEEDS = ["kill"] * 4 + ["segfault"] * 3 + ["exit"] * 2 + ["stop"]
FIRST_STEPS = 5  # before the first fault


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        fail_points.fail_point("inside backward")
        return grad


class Mlp(nn.Module):
    """The benchmarks' mlp, with batch norm and dropout, and two points in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(784, 1024), nn.BatchNorm1d(1024), nn.ReLU())
        self.middle = nn.Sequential(nn.Dropout(0.2), nn.Linear(1024, 1024), nn.ReLU())
        self.last = nn.Linear(1024, 10)

    def forward(self, x_NI: Tensor) -> Tensor:
        hidden = self.first(x_NI)
        fail_points.fail_point("inside forward")
        scores: Tensor = self.last(_Passed.apply(self.middle(hidden)))
        return scores


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(128, 784, generator=draw), torch.randint(0, 10, (128,), generator=draw))
        for _ in range(20)
    ]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_trainer(options: argparse.Namespace, **others: Any) -> phalanx.Trainer:
    torch.manual_seed(3)
    return phalanx.Trainer(
        Mlp(),
        nn.functional.cross_entropy,
        adamw,
        executor=phalanx.Processes(timeout_s=options.timeout_s, max_failures=None),
        replicas=options.workers,
        microbatches=8,
        seed=11,
        clip_norm=1.0,
        **others,
    )


def digest(trainer: phalanx.Trainer, losses: Sequence[float]) -> str:
    """Return a hash of the weights, the buffers, the optimizer's state and all losses."""
    found = hashlib.sha256(repr((list(losses), trainer.steps, trainer.epochs)).encode())
    tensors = dict(trainer.module.state_dict())
    for index, state in trainer.optimizer.state_dict()["state"].items():
        tensors.update({f"{index}.{key}": value for key, value in state.items()})
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# -- what happened ---------------------------------------------------


@dataclass
class Fault:
    """One fault that was planned.

    Attributes:
        kind: What is done, and whether at a point or at a moment.
        killed_s: When it was done; None while it is still to come.
        lost: What the trainer told of it.
        step_s: How long the update took in which it was noticed.
        recovery_s: From the deed to the end of that update.
    """

    worker: int
    deed: str
    point: str | None
    killed_s: float | None = None
    lost: phalanx.WorkerLost | None = None
    step_s: float = 0.0
    recovery_s: float = 0.0

    @property
    def kind(self) -> str:
        return f"{self.deed}, at a {'moment' if self.point is None else 'point'}"


@dataclass
class Run:
    """What a training has told."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lost: list[phalanx.WorkerLost] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0

    def note(self, event: object) -> None:
        if isinstance(event, phalanx.WorkerLost):
            self.lost.append(event)
        elif isinstance(event, phalanx.StepDone):
            now = time.monotonic()
            self.losses.append(event.loss)
            self.seconds.append(event.seconds)
            self.began_s, self.ended_s = self.began_s or now, now


class Chaos:
    """Plans one fault after another, from the trainer's own callbacks.

    Args:
        orders: For faults at points.
        progress: Told after each fault.
    """

    def __init__(
        self, options: argparse.Namespace, orders: Orders, progress: Callable[[int], None]
    ) -> None:
        self.run = Run()
        self.faults: list[Fault] = []
        self.unplanned: list[phalanx.WorkerLost] = []
        self.ordinary_s: list[float] = []  # of updates with all workers and without a fault
        self._complete = False  # whether all workers were there when the update began
        self._options = options
        self._orders = orders
        self._progress = progress
        self._random = random.Random(options.seed)
        self._plan: Fault | None = None
        self._assassin: threading.Thread | None = None
        self.trainer = make_trainer(options, callbacks=[self._told])

    def _told(self, event: object) -> None:
        self.run.note(event)
        if not isinstance(event, phalanx.StepDone):
            return
        if self._complete and not self.run.lost:
            self.ordinary_s.append(event.seconds)
        self._settle(event)
        self._complete = self._all_are_there()
        if len(self.faults) >= self._options.kills:
            self.trainer.stop()
        elif self._plan is None and event.step >= FIRST_STEPS and self._may_strike():
            self._strike()

    def _may_strike(self) -> bool:
        return self._complete or self._options.anytime

    def _settle(self, done: phalanx.StepDone) -> None:
        """See what has become of the plan in this update."""
        now = time.monotonic()
        plan = self._plan
        if plan is not None and plan.point is not None and plan.killed_s is None:
            plan.killed_s = self._orders.fired_s(plan.worker)
        for lost in self.run.lost:
            ours = plan is not None and plan.killed_s is not None and lost.worker == plan.worker
            if not ours or plan is None or plan.killed_s is None or plan.lost is not None:
                self.unplanned.append(lost)
                continue
            plan.lost, plan.step_s, plan.recovery_s = lost, done.seconds, now - plan.killed_s
            self.faults.append(plan)
            self._plan = None
            self._progress(len(self.faults))
        self.run.lost.clear()
        if self._plan is None and self._assassin is not None:
            self._assassin.join()
            self._assassin = None

    def _all_are_there(self) -> bool:
        return all(worker is not None for worker in self._workers())

    def _strike(self) -> None:
        worker = self._random.randrange(self._options.workers)
        deed = self._random.choice(DEEDS)
        if self._random.random() < 0.5:
            point = self._random.choice(_POINTS)
            self._plan = Fault(worker, deed, point)
            self._orders.give(worker, Order(point, deed, self._random.randint(1, 4)))
            return
        plan = self._plan = Fault(worker, deed, None)
        delay_s = self._random.uniform(0.0, 1.2) * statistics.median(self.run.seconds[-50:])
        pid = self._workers()[worker].pid

        def strike() -> None:
            threading.Event().wait(delay_s)
            plan.killed_s = time.monotonic()
            os.kill(pid, SIGNALS[deed])

        self._assassin = threading.Thread(target=strike, daemon=True)
        self._assassin.start()

    def _workers(self) -> list[Any]:
        return self.trainer._engine.executor._workers  # type: ignore[union-attr]


# -- the report ------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as ``share`` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def milliseconds(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return " / ".join(f"{percentile(values, share) * 1e3:.0f}" for share in (0.5, 0.99))


def table_of(found: Sequence[Fault], ordinary_s: float) -> Table:
    table = Table(
        title="Recovery in milliseconds, p50 / p99",
        caption=f"an ordinary update takes {ordinary_s * 1e3:.0f} ms (median between faults)",
    )
    table.add_column("fault", no_wrap=True)
    table.add_column("number", justify="right")
    table.add_column("deed to end\nof its update", justify="right")
    table.add_column("update, beyond\nan ordinary one", justify="right")
    table.add_column("noticed to end\nof its update", justify="right")

    def add(name: str, faults_: Sequence[Fault]) -> None:
        table.add_row(
            name,
            str(len(faults_)),
            milliseconds([each.recovery_s for each in faults_]),
            milliseconds([each.step_s - ordinary_s for each in faults_]),
            milliseconds([each.lost.seconds for each in faults_ if each.lost is not None]),
        )

    for kind in sorted({each.kind for each in found}):
        add(kind, [each for each in found if each.kind == kind])
    table.add_section()
    add("all that die", [each for each in found if each.deed != "stop"])
    add("all that hang", [each for each in found if each.deed == "stop"])
    return table


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout-s", type=float, default=3.0, help="after which a worker counts as hung"
    )
    parser.add_argument(
        "--anytime", action="store_true", help="strike also while replacements start"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    warnings.filterwarnings("ignore", message="`replicas` should be at most")
    console = Console()
    data = batches()
    with tempfile.TemporaryDirectory() as folder:
        fail_points.inject(Saboteur(folder))
        with console.status("training") as status:

            def progress(count: int) -> None:
                status.update(f"fault {count} of {options.kills}")

            chaos = Chaos(options, Orders(Path(folder)), progress)
            with chaos.trainer as trainer:
                trainer.fit(data, epochs=10**9)
                disturbed_hash = digest(trainer, chaos.run.losses)
                steps = trainer.steps
        fail_points.inject(None)
    run = Run()
    with (
        console.status(f"the same {steps} updates, undisturbed"),
        make_trainer(options, callbacks=[run.note]) as trainer,
    ):
        trainer.fit(data, steps=steps)
        undisturbed_hash = digest(trainer, run.losses)
    ordinary_s = statistics.median(chaos.ordinary_s)
    disturbed_s = chaos.run.ended_s - chaos.run.began_s
    undisturbed_s = run.ended_s - run.began_s
    console.print(table_of(chaos.faults, ordinary_s))
    console.print(
        f"{len(chaos.faults)} faults in {steps} updates, one every "
        f"{disturbed_s / len(chaos.faults):.1f} s (seed {options.seed}, {options.workers} workers)"
    )
    for lost in chaos.unplanned:
        console.print(f"beside the plan: worker {lost.worker} in update {lost.step}: {lost.reason}")
    wrong = [e for e in chaos.faults if e.lost and not _expected(e)]
    for each in wrong:
        console.print(f"another end than planned: {each}", style="yellow")
    console.print(
        f"an update of the undisturbed training: {statistics.median(run.seconds) * 1e3:.0f} ms"
    )
    console.print(
        f"goodput kept: {undisturbed_s / disturbed_s:.1%} "
        f"({undisturbed_s:.0f} s undisturbed, {disturbed_s:.0f} s disturbed)"
    )
    console.print(f"disturbed:   {disturbed_hash}\nundisturbed: {undisturbed_hash}")
    same = disturbed_hash == undisturbed_hash
    console.print("the same bits" if same else "DIFFERENT BITS", style="green" if same else "red")
    return 0 if same else 1


def _expected(fault: Fault) -> bool:
    assert fault.lost is not None
    deed = "terminate" if fault.deed == "exit" and fault.point is None else fault.deed
    return REASONS[deed] in fault.lost.reason


if __name__ == "__main__":
    sys.exit(main())
