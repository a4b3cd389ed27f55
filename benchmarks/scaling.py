"""``python -m benchmarks scaling``: simulate a step of many workers, beside 1, 2 and 4 real ones.

The parts of a step are timed on one core, in turn with steps of `Trainer`. A simulated step is:

    each worker's gradients of its microbatches, 4 or one for each worker: a line through the
        gradients of all rows, half and a quarter
    the tree that adds them: an addition for each level
    the optimizer, in shards: shared by the workers

where workers that outnumber the cores take turns. It leaves out that cores share caches and memory,
and what threads cost; the error printed beside the measured steps says how much that is. All
times are the shortest ones, which other work on the machine disturbs least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from benchmarks.contest import Step, commands_of
from benchmarks.models import MODELS, Batch, loss_of
from benchmarks.report import OUT, Names, Out, Rounds, Row, Run, Sheet, ratio, read_names
from benchmarks.step import StepJob

_MEASURED = (1, 2, 4)
_SIMULATED = (8, 16, 32, 64)
_SHARES = (1, 2, 4)  # whole batch, half, and a quarter
_MICROBATCHES = 4  # `Trainer`'s default
_KEPT, _WARMUP = 3, 4


@dataclass(frozen=True, kw_only=True)
class PartJob(StepJob):
    """A process that makes one part of a step over and over, with one thread."""

    def open(self, stack: ExitStack) -> Step:  # noqa: ARG002 -- nothing is to be closed
        """Set up, and return the part."""
        torch.set_num_threads(1)
        module, batch = self.what.make()
        optimizer = self.what.optimizer(module.parameters())

        def gradient(share: int) -> Step:
            inputs, targets = _share_of(batch, share)

            def step() -> None:
                optimizer.zero_grad()
                loss_of(module(inputs), targets).backward()

            return step

        gradient(1)()
        sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
        gradients = [torch.ones_like(each) for each in sums]
        parts: dict[str, Step] = {f"gradient-{share}": gradient(share) for share in _SHARES}
        parts["add"] = lambda: torch._foreach_add_(sums, gradients)
        parts["optimizer"] = optimizer.step
        return parts[self.contestant]


def _share_of(batch: Batch, share: int) -> Batch:
    inputs, targets = (whole.chunk(share)[0] for whole in batch)
    return inputs, targets


@dataclass(frozen=True)
class Costs:
    """The seconds of a step's parts on one core."""

    gradient_fixed: float
    gradient_per_batch: float
    add: float
    optimizer: float

    @classmethod
    def fit(cls, seconds: Mapping[str, float]) -> Costs:
        """Fit a line to the gradients of shares of the batch; take the rest as it is."""
        points = [(1 / share, seconds[f"gradient-{share}"]) for share in _SHARES]
        mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points)
        slope /= sum((x - mean_x) ** 2 for x, _ in points)
        fixed = max(0.0, mean_y - slope * mean_x)
        return cls(fixed, slope, seconds["add"], seconds["optimizer"])

    def step_s(self, workers: int, cores: int) -> float:
        """Return the seconds of a step of so many workers.

        Example:
            >>> Costs(0.0, 8.0, 1.0, 4.0).step_s(4, cores=4)  # 8 / 4 + 2 + 4 / 4
            5.0
        """
        microbatches = max(_MICROBATCHES, workers)
        one_s = self.gradient_fixed + self.gradient_per_batch / microbatches
        at_once = min(workers, cores)
        levels = math.ceil(math.log2(microbatches))
        return microbatches / at_once * one_s + levels * self.add + self.optimizer / at_once


def scaling(models: Names = "mlp,cnn,gpt", rounds: Rounds = 8, out: Out = OUT) -> None:
    """Simulate a step of up to 64 workers, and print its error against 1, 2 and 4 measured."""
    run = Run("scaling", out)
    for model in read_names("models", models, MODELS):
        commands = {}
        for part in (*(f"gradient-{share}" for share in _SHARES), "add", "optimizer"):
            commands[part] = commands_of(PartJob(contestant=part, model=model, workers=1), 1)
        for workers in _MEASURED:
            job = StepJob(contestant="trainer-m4", model=model, workers=workers)
            commands[f"workers-{workers}"] = commands_of(job, 1)
        outcome = run.compete(model, commands, {"step": _KEPT}, rounds, settle=_WARMUP)
        if not outcome.failures:
            shortest = {name: min(outcome.all(name, "step")) for name in outcome.answers}
            run.sheets.append(_sheet(model, shortest, run.machine["cores"]))
    run.publish()


def _sheet(model: str, shortest: Mapping[str, float], cores: int) -> Sheet:
    costs = Costs.fit(shortest)
    rows: list[Row] = []
    one_s = costs.step_s(1, 1)
    for workers in _MEASURED:
        simulated_s, measured_s = costs.step_s(workers, cores), shortest[f"workers-{workers}"]
        error = 100 * (simulated_s / measured_s - 1)
        cells = (1e3 * simulated_s, one_s / simulated_s, 1e3 * measured_s, f"{error:+.0f} %")
        rows.append((f"workers: {workers}, cores: {cores}", *cells))
    for workers in _SIMULATED:
        simulated_s = costs.step_s(workers, workers)
        speedup = ratio(one_s, simulated_s)
        rows.append((f"workers and cores: {workers}", 1e3 * simulated_s, speedup, None, None))
    columns = ("simulated\nms", "speed-up", "measured\nms", "error")
    return Sheet(f"{model}: a step of `Trainer`", columns, rows)
