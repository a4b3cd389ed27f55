"""What a trainer tells of itself."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.execution import ExecutorChoice
from phalanx.train.engines import Engines
from phalanx.train.position import Position
from phalanx.train.step import EngineSpec, StepEngine

__all__ = ["TrainerFacts"]


class TrainerFacts:
    """The properties of a `Trainer`, which it has as its base for this alone."""

    module: nn.Module
    _spec: EngineSpec
    _position: Position
    _engines: Engines
    _choice: ExecutorChoice
    _stopped: bool

    @property
    def steps(self) -> int:
        """Optimizer updates done since the beginning."""
        return self._position.steps

    @property
    def epochs(self) -> int:
        """Epochs finished since the beginning."""
        return self._position.epochs

    @property
    def stopped(self) -> bool:
        """Whether the last :meth:`fit` was ended by :meth:`stop`."""
        return self._stopped

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica; empty until the trial of `replicas="auto"`."""
        return () if self._engines.formation is None else self._engines.formation.devices

    @property
    def intra_op(self) -> int | None:
        """Threads inside operators, per replica; None until the trial of `replicas="auto"`."""
        return None if self._engines.formation is None else self._engines.formation.intra_op

    @property
    def workloads(self) -> tuple[float, ...]:
        """Each replica's relative share of the next batch; empty until replicas are chosen."""
        return self._engines.workloads

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The worker processes' numbers; empty without any, and before the first step."""
        return () if self._engine is None else tuple(self._engine.executor.worker_pids)

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes files for all: the first of the ranks, or one without any."""
        return self._choice.is_first

    @property
    def _engine(self) -> StepEngine | None:
        return self._engines.current

    def __repr__(self) -> str:
        formation = str(self._engines.formation or "replicas to be chosen")
        count = self._spec.splitter.microbatches
        split = "" if count is None else f", {count} microbatches"
        return f"Trainer({type(self.module).__name__} on {formation}{split}, step {self.steps})"
