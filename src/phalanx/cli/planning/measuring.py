"""Measure what a prediction needs, on this machine: a few steps of each formation.

A step of three models (see `FormationCosts`) with one worker and with two, of ranks with three as
well, and where there are more cores with one for each; then single operations, and lost workers.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.cli.planning.hollow import SIZES, Subject, repeated
from phalanx.cli.planning.rank_steps import time_ranks
from phalanx.cli.planning.timing import time_steps, usual_step_s
from phalanx.clock import now_s
from phalanx.distributed import launch
from phalanx.execution import Processes
from phalanx.forecast import FORMATIONS, FormationCosts, StepCosts
from phalanx.replicas import num_cores
from phalanx.train import Trainer

__all__ = ["at_rest", "measure", "measure_steps"]

_TURN_S = 0.6  # of each model in each formation
_MOST_MEASURED = 16  # workers
_KILLS = 3
_SIGKILL = 9
_OF_RANKS = ("ranks", "ddp")

Tell = Callable[[str], None]
Seconds = dict[str, dict[int, dict[str, float]]]  # of a step, by formation, workers, and model


@dataclass(frozen=True)
class _Loss:
    """What the loss of a worker process costs."""

    recovery_s: float
    restart_s: float


def measure(subject: Subject, formations: Sequence[str], tell: Tell) -> StepCosts:
    """Measure all that `phalanx.forecast.predict` needs of these formations.

    Args:
        tell: Told what is measured next.

    Blocks: For half a minute, or longer where steps are.
    """
    cores = num_cores()
    counts = {
        # What another peer costs shows from the third rank on; the second costs that there is one.
        name: sorted({1, 2, min(cores, _MOST_MEASURED), *((3,) if name in _OF_RANKS else ())})
        for name in formations
    }
    steps: Seconds = {}
    for group in (_OF_RANKS, tuple(set(FORMATIONS) - set(_OF_RANKS))):
        some = [name for name in formations if name in group]
        if some:
            steps |= measure_steps(subject, some, counts[some[0]], SIZES, tell)
    steps = {name: at_rest(by_count) for name, by_count in steps.items()}
    tell("single operations")
    module, _ = subject.build("whole")
    trained = [each for each in module.parameters() if each.requires_grad]
    with _one_thread():
        optimizer_s, add_s = _time_optimizer(subject, trained), _time_addition(trained)
        jitter = _jitter(subject)
    loss = _Loss(0.0, 0.0)
    if "processes" in formations:
        tell(f"processes: {_KILLS} of them are killed")
        loss = _time_loss(subject)
    tell("how long a job takes to start")
    start_s = _time_start(subject)
    costs = {
        name: FormationCosts(
            workers=tuple(counts[name]),
            empty_s=tuple(steps[name][count]["empty"] for count in counts[name]),
            hollow_s=tuple(steps[name][count]["hollow"] for count in counts[name]),
            whole_s=tuple(steps[name][count]["whole"] for count in counts[name]),
            restart_s=loss.restart_s if name == "processes" else start_s,
            recovery_s=loss.recovery_s if name == "processes" else None,
        )
        for name in formations
    }
    return StepCosts(
        model=f"{subject.options.model} on {subject.options.data}",
        rows=subject.options.batch_size,
        cores=cores,
        gradient_bytes=sum(each.numel() * each.element_size() for each in trained),
        optimizer_s=optimizer_s,
        add_s=add_s,
        jitter=jitter,
        formations=costs,
    )


def measure_steps(
    subject: Subject,
    formations: Sequence[str],
    counts: Sequence[int],
    sizes: Sequence[str],
    tell: Tell,
) -> Seconds:
    """Return the usual step of each formation, with each number of workers and each model."""
    found: Seconds = {name: {} for name in FORMATIONS if name in formations}
    of_ranks = [name for name in found if name in _OF_RANKS]
    for count in counts:
        for name in found:
            if name not in of_ranks:
                tell(f"{name}, {count}")
                executor = Processes(max_failures=None) if name == "processes" else name
                found[name][count] = {
                    size: _time_trainer(subject, size, executor, count) for size in sizes
                }
        if of_ranks:
            tell(f"{' and '.join(of_ranks)}, {count}")
            told = launch(time_ranks, count, args=(subject, of_ranks, list(sizes), _TURN_S))[0]
            for name in of_ranks:
                found[name][count] = told[name]
    return found


def at_rest(seconds: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Return what steps take without other work, which only makes them longer.

    A model that computes more, or one more worker, never makes a step shorter; so each is at most
    what was measured of those that do more.

    Example:
        >>> at_rest({1: {"empty": 9.0, "hollow": 2.0}, 2: {"empty": 1.0, "hollow": 3.0}})
        {1: {'empty': 1.0, 'hollow': 2.0}, 2: {'empty': 1.0, 'hollow': 3.0}}
    """
    sizes = list(next(iter(seconds.values())))
    return {
        count: {
            size: min(
                seconds[more][larger]
                for more in seconds
                for larger in sizes[place:]
                if more >= count
            )
            for place, size in enumerate(sizes)
        }
        for count in seconds
    }


def _time_trainer(subject: Subject, size: str, executor: str | Processes, count: int) -> float:
    module, loss = subject.build(size)
    batch = repeated(subject.microbatch(), count)
    with (
        warnings.catch_warnings(),
        Trainer(
            module, loss, subject.optimizer(), replicas=count, executor=executor, intra_op=1
        ) as trainer,
    ):
        # More workers than cores are what is to be measured.
        warnings.filterwarnings("ignore", message=".*at most the .* cores of this machine")
        return usual_step_s(lambda: trainer.step(batch), _TURN_S)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_optimizer(subject: Subject, trained: list[torch.nn.Parameter]) -> float:
    for each in trained:
        each.grad = torch.zeros_like(each)
    return usual_step_s(subject.optimizer()(trained).step, _TURN_S)


def _time_addition(trained: list[torch.nn.Parameter]) -> float:
    total, other = (
        torch.zeros(sum(each.numel() for each in trained), dtype=trained[0].dtype) for _ in range(2)
    )
    return usual_step_s(lambda: total.add_(other), _TURN_S)


def _jitter(subject: Subject) -> float:
    """Return the standard deviation of the logarithm of a step's seconds.

    From its lower quantiles: what interrupts a step is other work.
    """
    module, loss = subject.build("whole")
    batch = subject.microbatch()
    with Trainer(module, loss, subject.optimizer(), executor="inline", intra_op=1) as trainer:
        taken_s = sorted(time_steps(lambda: trainer.step(batch), 2 * _TURN_S))
    below = taken_s[round(0.16 * (len(taken_s) - 1))]  # by one standard deviation, of a normal one
    return math.log(statistics.median(taken_s) / below)


def _time_loss(subject: Subject) -> _Loss:
    """Kill worker processes between two steps, and see how long the next step takes."""
    module, loss = subject.build("whole")
    batch = repeated(subject.microbatch(), 2)
    recoveries, restarts = [], []
    with Trainer(
        module,
        loss,
        subject.optimizer(),
        replicas=2,
        executor=Processes(max_failures=None),
        intra_op=1,
    ) as trainer:
        ordinary_s = usual_step_s(lambda: trainer.step(batch), _TURN_S)
        for _ in range(_KILLS):
            killed_s, lost = now_s(), trainer.worker_pids[0]
            os.kill(lost, _SIGKILL)
            trainer.step(batch)
            recoveries.append(max(0.0, now_s() - killed_s - ordinary_s))
            while lost in trainer.worker_pids or not all(trainer.step(batch).shares):
                trainer.step(batch)
            restarts.append(now_s() - killed_s)
    return _Loss(statistics.median(recoveries), statistics.median(restarts))


def _time_start(subject: Subject) -> float:
    """Return how long a job of one rank takes that does next to nothing."""
    began_s = now_s()
    launch(time_ranks, 1, args=(subject, [], [], 0.0))
    return now_s() - began_s
