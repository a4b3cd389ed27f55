"""The loss and the metrics over a loader, in eval mode, without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.execution import GroupChanged, RunResult
from phalanx.metrics import ReplicaMetrics
from phalanx.plan import check_iterable
from phalanx.train.microbatches import Microbatches
from phalanx.train.objective import EvaluateTask
from phalanx.train.step_engine import StepEngine, loss_of, outputs_of, run_task
from phalanx.types import Nested

__all__ = ["enter_training", "evaluate", "leave_evaluation", "names_of_means"]


def enter_training(module: nn.Module) -> None:
    """Put a model into training mode, but leave parts in eval mode that are so among others.

    Such parts are frozen, as batch norm often is; a model that is in eval mode as a whole has been
    evaluated. A model may freeze its parts in `train()`, too.
    """
    modes = [(each, each.training) for each in module.modules()]
    module.train()
    if any(training for _, training in modes):
        for each, training in modes:
            each.training = training and each.training


def leave_evaluation(module: nn.Module) -> None:
    """Put a model that is in eval mode as a whole into training mode."""
    if not module.training and not any(each.training for each in module.modules()):
        module.train()


def names_of_means(metrics: ReplicaMetrics, *, validates: bool) -> tuple[str, ...]:
    """Return what an `EpochDone` will hold, such as "train.loss"."""
    kinds = ("train", "validation") if validates else ("train",)
    return tuple(f"{kind}.{name}" for kind in kinds for name in ("loss", *metrics.names))


def evaluate(
    loader: Iterable[Nested],
    module: nn.Module,
    open_engine: Callable[[Nested], StepEngine],
    task: EvaluateTask,
    *,
    metrics: ReplicaMetrics,
    workloads: Callable[[], Sequence[float]],
    seed: tuple[int, ...],
) -> dict[str, float]:
    """Return the weighted mean loss and the metrics over all of ``loader``.

    The module's modes are as before afterwards.

    Args:
        open_engine: Returns the engine, made for a first batch where there is none.
        metrics: Counted in a copy.
        workloads: Returns the shares of the replicas.
        seed: Where random numbers start; each batch appends its place.

    Raises:
        ConfigError: The loader yields nothing, or no batches.
    """
    check_iterable("loader", loader, "yield batches", "Give a `DataLoader`, or a list of batches.")
    metrics = metrics.copy()
    modes = [(child, child.training) for child in module.modules()]
    total = weight = 0.0
    engine: StepEngine | None = None
    try:
        for place, batch in enumerate(loader):
            if engine is None:
                engine = open_engine(batch)
                metrics.reset()
                module.eval()
            microbatches, result = _run(engine, batch, workloads, task, (*seed, place))
            engine.executor.mark_done()
            metrics.update(outputs_of(result))
            total += loss_of(microbatches, result) * microbatches.weight
            weight += microbatches.weight
    finally:
        for child, training in modes:
            child.training = training
    if engine is None:
        raise ConfigError("`loader` must yield at least one batch, but yields none.")
    return {"loss": total / weight, **metrics.compute()}


def _run(
    engine: StepEngine,
    batch: Nested,
    workloads: Callable[[], Sequence[float]],
    task: EvaluateTask,
    seed: tuple[int, ...],
) -> tuple[Microbatches, RunResult]:
    """Run ``task`` on one batch; again where ranks have changed under it."""
    while True:
        microbatches = engine.split(batch, workloads())
        with torch.no_grad(), contextlib.suppress(GroupChanged):
            return microbatches, run_task(engine.executor, microbatches, task, seed)
