"""The optimizer's step, every worker process its shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from phalanx.execution.shard_step import (
    Key,
    OptimizerShard,
    Options,
    ShardPlan,
    StepShard,
    plan_shard,
    shard_name,
)
from phalanx.execution.sharded_optimizer import FlatStepper
from phalanx.execution.worker_main import Worker
from phalanx.memory import FlatParameters, SharedMemoryPool

__all__ = ["LEAST_SHARD_ELEMENTS", "SharedStepper", "is_worth_sending"]

LEAST_SHARD_ELEMENTS = 1 << 21
_MakeCall = Callable[[Collection[str]], Callable[[Worker], object]]

_numbers = itertools.count()  # one for each plan ever made, so that workers cannot mix them up


def is_worth_sending(num_elements: int, num_workers: int) -> bool:
    """Tell whether workers step their shards, or this process all of so few elements."""
    return num_elements >= LEAST_SHARD_ELEMENTS * num_workers


class SharedStepper(FlatStepper):
    """An elementwise optimizer on shared memory, each worker process at a part of it.

    The first step, which makes the optimizer's state, is done by this process, and so are shards
    that take less time than two messages and an undo record (docs/decisions/0009). A shard whose
    worker is lost is completed here at once (see `shard_step.py`).

    Args:
        optimizer: The user's; its options and state stay the truth.
        flat: The parameters, on the executor's pool.
        num_workers: Number of workers.
        pool: Where they find the shards.
        call_worker: Lets a worker step one; see `ProcessExecutor.call_worker`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        flat: FlatParameters,
        *,
        num_workers: int,
        pool: SharedMemoryPool,
        call_worker: Callable[[int, _MakeCall], bool],
    ) -> None:
        self._pool = pool
        self._call_worker = call_worker
        self._shards: list[_Planned] = []
        super().__init__(optimizer, flat, num_workers, allocate=pool.allocate)
        elements = sum(segment.values.numel() for segment in flat.segments)
        self._is_worth_sending = is_worth_sending(elements, num_workers)
        self._has_state = bool(optimizer.state)

    def prepare(
        self, missing: Sequence[int], gradients: Sequence[Tensor | None] | None = None
    ) -> None:
        super().prepare(missing, gradients)
        if not self._is_worth_sending:
            return
        self._options: Mapping[Key, Options] = {
            key: options for piece in self._pieces for key, options in piece.options()
        }
        if any(piece.lacks_momentum() for piece in self._pieces):
            self._shards = []  # this process makes it: what a worker makes, nobody else sees
        elif self._has_state:
            for part in range(len(self._shards), len(self._pieces)):
                self._shards.append(self._plan(part))  # kept, should there be no room for the next

    def step_part(self, part: int) -> None:
        if not self._shards:
            super().step_part(part)
            return
        planned = self._shards[part]
        owned = self._pieces[part].everything()
        counts = [float(state.get("step", 0.0)) for _, state in owned]
        steps = tuple(counts[place] for place in planned.ranges)
        planned.shard.begin()

        def step(saved: Collection[str]) -> StepShard:
            plan = None if shard_name(planned.number) in saved else planned.plan
            return StepShard(planned.number, plan, self._options, steps)

        if not self._call_worker(part, step):
            planned.shard.step(self._options, steps)
        for _, state in owned:
            if isinstance(state.get("step"), Tensor):
                state["step"] += 1

    def finish(self) -> None:
        super().finish()
        self._has_state = True

    def _plan(self, part: int) -> _Planned:
        plan, ranges = plan_shard(
            type(self._optimizer), self._pieces[part].everything(), self._pool
        )
        own = OptimizerShard(plan, self._pool, self._options)
        return _Planned(next(_numbers), plan, own, ranges)


@dataclass(frozen=True)
class _Planned:
    """A shard, as this process sees it.

    Attributes:
        ranges: For each block, the place of its range among those of the part.
    """

    number: int
    plan: ShardPlan
    shard: OptimizerShard
    ranges: list[int]
