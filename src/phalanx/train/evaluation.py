"""The loss and the metrics over a loader, in eval mode, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.execution import MicrobatchContext, MicrobatchResult
from phalanx.metrics import ReplicaMetrics
from phalanx.plan import check_iterable
from phalanx.train.step_engine import StepEngine, counted, loss_of
from phalanx.types import Nested

__all__ = ["evaluate"]


def evaluate(
    loader: Iterable[Nested],
    module: nn.Module,
    open_engine: Callable[[Nested], StepEngine],
    run: Callable[[MicrobatchContext], MicrobatchResult],
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

    Raises:
        ConfigError: The loader yields nothing, or no batches.
    """
    check_iterable("loader", loader, "yield batches", "Give a `DataLoader`, or a list of batches.")
    metrics = metrics.copy()
    modes = [(child, child.training) for child in module.modules()]
    total = weight = 0.0
    engine: StepEngine | None = None
    try:
        for batch in loader:
            if engine is None:
                engine = open_engine(batch)
                metrics.reset()
                module.eval()
            pieces = engine.cut(batch, workloads())
            with torch.no_grad():
                report = engine.compute(pieces, run, seed)
            metrics.update(counted(report))
            total += loss_of(pieces, report) * pieces.weight
            weight += pieces.weight
    finally:
        for child, training in modes:
            child.training = training
    if engine is None:
        raise ConfigError("`loader` must yield at least one batch, but yields none.")
    return {"loss": total / weight, **metrics.compute()}
