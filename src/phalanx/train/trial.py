"""Compute a first batch's gradients to no effect, to find out what is fast here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from phalanx.execution import ThreadExecutor
from phalanx.plan import flatten, unflatten
from phalanx.train.formation import Formation, candidates, try_out
from phalanx.train.microbatches import Splitter
from phalanx.train.objective import Objective, TrainTask
from phalanx.train.step_engine import run_task
from phalanx.types import Nested

__all__ = ["Trial"]


class Trial:
    """Trial runs of ``module`` on one batch; they change neither weights nor buffers.

    Args:
        module: What is to be trained.
        splitter: How the batch is split.
        objective: What is computed.
        batch: The batch.
    """

    def __init__(
        self, module: nn.Module, splitter: Splitter, objective: Objective, batch: Nested
    ) -> None:
        self._module = module
        self._splitter = splitter
        self._objective = objective
        leaves, spec = flatten(batch)  # copied, because models may change their inputs
        copies = [
            leaf.clone()
            if isinstance(leaf, torch.Tensor)
            else (leaf.copy() if isinstance(leaf, np.ndarray) else leaf)
            for leaf in leaves
        ]
        self._batch = unflatten(copies, spec)

    def choose(
        self, home: torch.device, workloads: Sequence[float] | None
    ) -> tuple[Formation, str]:
        """Return the fastest formation, and a line that says why.

        Args:
            home: Where the replicas shall be.
            workloads: A share for each replica, if their number is decided.
        """
        if workloads is not None:
            return Formation((home,) * len(workloads), 1), "as many as there are workloads"
        assert self._splitter.microbatches is not None  # "auto" is refused without
        options = candidates(home, self._splitter.microbatches)
        if len(options) == 1:
            return options[0], "the only choice"
        return try_out(options, self._open)

    def _open(self, formation: Formation) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a function that computes the batch's gradients, and one that ends its threads."""
        executor = ThreadExecutor(self._module, formation.devices, intra_op=formation.intra_op)
        microbatches = self._splitter.split(self._batch, executor.workloads)
        task = TrainTask(self._objective, microbatches.scales, keep_outputs=False)

        def run() -> None:
            with torch.enable_grad():
                run_task(executor, microbatches, task, seed=(0,))

        return run, executor.close
