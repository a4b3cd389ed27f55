"""One pass over a loader, in eval mode and without gradients: loss and metrics, or outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.execution import RunResult, repeat_on_new_ranks
from phalanx.metrics import Metrics
from phalanx.plan import Merging
from phalanx.train.objective import EvaluateTask, PredictTask, is_pair
from phalanx.train.step import Engine, Microbatches
from phalanx.train.trainer_arguments import check_between_steps, check_loader
from phalanx.types import Nested


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


@dataclass(frozen=True)
class Evaluation:
    """One pass over a loader, in eval mode and without gradients.

    The module's modes, weights and buffers are as before afterwards.

    Attributes:
        engine: It runs the module.
        steps: Updates done, with which the random numbers start.
    """

    engine: Engine
    steps: int

    def evaluate(self, loader: Iterable[Nested], metrics: Metrics, name: str) -> dict[str, float]:
        """Return the weighted mean loss and the metrics over all of ``loader``.

        Args:
            metrics: Counted in a copy.
            name: What errors call the loader.

        Raises:
            ConfigError: The loader yields nothing, or no batches.
        """
        task = EvaluateTask(self.engine.objective, keep_outputs=bool(metrics))
        metrics = metrics.fresh()
        total = weight = 0.0
        with self._evaluating() as begin:
            for microbatches, result in self._results(loader, task, begin, name):
                if metrics:
                    metrics.update(*microbatches.outputs_of(result.results, metrics.joining))
                total += microbatches.loss_of(result.results) * microbatches.weight
                weight += microbatches.weight
        return {"loss": total / weight, **metrics.compute()}

    def predict(self, loader: Iterable[Nested]) -> Nested:
        """Return the module's outputs for all of ``loader``, where the module is.

        Raises:
            ConfigError: As :meth:`evaluate`; or outputs have no rows that could be joined.
        """
        task = PredictTask(self.engine.objective)
        parts, sizes = [], []
        with self._evaluating() as begin:
            for microbatches, result in self._results(loader, task, begin, "loader"):
                for each, size in zip(result.results, microbatches.sizes, strict=True):
                    if each is not None:
                        parts.append(each.outputs)
                        sizes.append(size)
        way_out = "Call `trainer.module` yourself for outputs of another form."
        merging = Merging(dim=self.engine.layout.dim, noun="microbatch", way_out=way_out)
        return merging.merge(parts, sizes, next(self.engine.module.parameters()).device)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[Callable[[], object]]:
        """Give a function that puts the module into eval mode, until the body ends.

        It is to be called when the engine is open: ranks have one another's weights then.
        """
        module = self.engine.module
        modes = [(child, child.training) for child in module.modules()]
        try:
            yield module.eval
        finally:
            for child, training in modes:
                child.training = training

    def _results(
        self,
        loader: Iterable[Nested],
        task: EvaluateTask | PredictTask,
        begin: Callable[[], object],
        name: str,
    ) -> Iterator[tuple[Microbatches, RunResult]]:
        """Run ``task`` on each batch."""
        check_loader(name, loader)
        predicts = isinstance(task, PredictTask)
        place = -1
        for place, given in enumerate(loader):
            batch = self._in_pair(given) if predicts else given
            if place == 0:
                self.engine.open()
                begin()
            yield repeat_on_new_ranks(partial(self._run, batch, task, place))
        if place < 0:
            raise ConfigError(f"`{name}` must yield at least one batch, but yields none.")

    def _in_pair(self, batch: Nested) -> Nested:
        """Make inputs alone a pair, so that a layout's paths mean the same leaves."""
        engine = self.engine
        is_users = engine.objective.is_forward or engine.layout.split is not None
        return batch if is_users or is_pair(batch) else (batch, None)

    def _run(
        self, batch: Nested, task: EvaluateTask | PredictTask, place: int
    ) -> tuple[Microbatches, RunResult]:
        """Run ``task`` on one batch, whose random numbers belong to its place."""
        weighs = isinstance(task, EvaluateTask)  # targets may be missing
        engine = self.engine
        check_between_steps(closed=not engine.is_open)  # by the loader, or a signal's handler
        try:
            microbatches, executor = engine.split(batch, weighs=weighs), engine.executor
            executor.follow_attributes()  # also those that were assigned since the last batch
            with torch.no_grad():
                result = executor.run(
                    task,
                    microbatches.pieces,
                    weights=microbatches.weights,
                    seed=(engine.seed, self.steps, place),
                    owners=microbatches.owners,
                )
            executor.mark_done()
        except Exception as error:
            pass_name = "evaluation" if weighs else "prediction"
            error.add_note(f"In batch {place + 1} of the {pass_name}.")
            raise
        return microbatches, result
