"""``python -m benchmarks scaling``: simulate a step of 1, 2 and 4 workers, beside real ones.

The parts of a step are timed on one core, in turn with real steps of `Trainer`. Simulated workers
take microbatches and add gradients along the tree, as the replicas do; then they share the last
addition and the optimizer's step. Threads, and memory that cores share, cost nothing there: the
printed error shows how much that is.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from benchmarks.contest import Step, commands_of
from benchmarks.models import MODELS, loss_of
from benchmarks.report import OUT, Names, Out, Rounds, Row, Run, Sheet, read_names
from benchmarks.step import KEPT, WARMUP, StepJob

_PIECES = {"whole": 1, "quarter": 4}  # whose gradients are timed
_WORKERS = (1, 2, 4)
_MICROBATCHES = 4


@dataclass(frozen=True, kw_only=True)
class PartJob(StepJob):
    """A process that repeats one part of a step, with one thread."""

    def open(self, stack: ExitStack) -> Step:  # noqa: ARG002 -- nothing is to be closed
        """Set up, and return the part."""
        torch.set_num_threads(1)
        module, batch = self.what.make()
        optimizer = self.what.optimizer(module.parameters())
        inputs, targets = (each.chunk(_PIECES.get(self.contestant, 1))[0] for each in batch)

        def gradient() -> None:
            optimizer.zero_grad()
            loss_of(module(inputs), targets).backward()

        gradient()
        sums, added = ([torch.ones_like(each) for each in module.parameters()] for _ in range(2))
        parts: dict[str, Step] = {"optimizer": optimizer.step}
        parts["addition"] = lambda: torch._foreach_add_(sums, added)
        return parts.get(self.contestant, gradient)


def step_s(workers: int, pieces: int, piece_s: float, addition_s: float, last_s: float) -> float:
    """Return the seconds of a step of so many workers, which share the last part of it.

    Example:
        >>> [step_s(workers, 4, 2.0, 1.0, 8.0) for workers in (1, 2, 3, 4)]
        [18.0, 10.0, 7.666666666666666, 5.0]
    """
    free_s = [0.0] * workers  # when each of them is
    sums: dict[tuple[int, int], float] = {}  # when each is there, by its width and first piece
    for piece in range(pieces):
        now_s, width, first = heapq.heappop(free_s) + piece_s, 1, piece
        while 2 * width < pieces:
            sums[width, first] = now_s
            width, other, first = 2 * width, first ^ width, first & ~width
            if other < pieces and (width // 2, other) not in sums:
                break  # who has the other part adds
            if other < pieces:
                now_s = max(now_s, sums[width // 2, other]) + addition_s
        heapq.heappush(free_s, now_s)
    return max(free_s) + last_s / workers


def scaling(models: Names = "mlp,cnn,gpt", rounds: Rounds = 8, out: Out = OUT) -> None:
    """Simulate a step of 1, 2 and 4 workers, and print its error against real ones."""
    run = Run("scaling", out)
    for model in read_names("models", models, MODELS):
        commands = {}
        for part in (*_PIECES, "addition", "optimizer"):
            commands[part] = commands_of(PartJob(contestant=part, model=model, workers=1), 1)
        for count in _WORKERS:
            job = StepJob(contestant="trainer-m4", model=model, workers=count)
            commands[str(count)] = commands_of(job, 1)
        outcome = run.compete(model, commands, {"step": KEPT}, rounds, settle=WARMUP)
        if not outcome.failures:
            run.sheets.append(_sheet(model, outcome.medians("step"), run.machine["cores"]))
    run.publish()


def _sheet(model: str, medians: Mapping[str, float], cores: int) -> Sheet:
    per_batch_s = (medians["whole"] - medians["quarter"]) / (1 - 1 / 4)  # a line through both
    fixed_s, last_s = medians["whole"] - per_batch_s, medians["addition"] + medians["optimizer"]
    rows: list[Row] = []
    piece_s = fixed_s + per_batch_s / _MICROBATCHES
    for workers in _WORKERS:
        at_once = min(workers, cores)
        found_s = step_s(at_once, _MICROBATCHES, piece_s, medians["addition"], last_s)
        real_s = medians[str(workers)]
        error = f"{100 * (found_s / real_s - 1):+.0f} %"
        name = f"{workers} workers, {_MICROBATCHES} microbatches, {at_once} cores"
        rows.append((name, 1e3 * found_s, 1e3 * real_s, error))
    return Sheet(f"A step of {model}", ("simulated\nms", "measured\nms", "error"), rows)
