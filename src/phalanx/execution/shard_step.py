"""One worker process's shard of the optimizer's step, made whole whatever becomes of the worker.

The shard is stepped in blocks. Before a block is touched, all that the step will change is copied
to an undo record beside it, and the progress says so; after it, the progress says that it is done:

    progress   saved = 3, done = 2        block 2 may be old, new or half new: the record has it old
    undo       | block 2's values | its moments |

All three lie in shared memory. A store that a process has made before it died is seen by whoever
looks after its death, in the order in which it was made. So if a worker dies at any instruction,
whoever looks next puts the block back if the progress says that its record is complete, and goes
on from the first block that is not done: every element is stepped exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.execution.worker_main import Worker
from phalanx.ipc import fail_point
from phalanx.memory import Range, SharedMemoryPool, TensorHandle

__all__ = ["BLOCK_ELEMENTS", "OptimizerShard", "ShardPlan", "StepShard", "plan_shard", "shard_name"]

BLOCK_ELEMENTS = 1 << 18  # fewer cost more memory traffic, more cost more calls: measured
_DONE, _SAVED = 0, 1
_PREFIX = "shard "

# Any: options and state entries of torch's optimizers.
Options = Mapping[str, Any]
# By the number of the optimizer's group, and dtype: what is complex in a group is never fused.
Key = tuple[int, torch.dtype]


@dataclass(frozen=True)
class Block:
    """Some elements of one segment: where they, their gradients and their state lie."""

    group: int
    values: TensorHandle
    gradients: TensorHandle
    state: tuple[tuple[str, TensorHandle], ...]

    @property
    def key(self) -> Key:
        """Under which its options are found."""
        return self.group, self.values.dtype


@dataclass(frozen=True)
class ShardPlan:
    """What does not change from step to step.

    Attributes:
        kind: The optimizer's class.
        undo: The undo record: as many rows as any block has tensors, each of the largest block.
        progress: Two counters, of blocks done and of records complete.
    """

    kind: type[Optimizer]
    blocks: tuple[Block, ...]
    undo: tuple[TensorHandle, ...]
    progress: TensorHandle


class OptimizerShard:
    """The blocks of one shard, in this process or in the worker's.

    Args:
        plan: Where everything lies.
        pool: Of this process.
        options: Of the optimizer, for each kind of block.
    """

    def __init__(
        self, plan: ShardPlan, pool: SharedMemoryPool, options: Mapping[Key, Options]
    ) -> None:
        self._blocks = [_OpenBlock(plan.kind, block, pool, options) for block in plan.blocks]
        self._undo = [pool.at(place) for place in plan.undo]
        self._progress = pool.at(plan.progress).numpy()

    def begin(self) -> None:
        """Forget the step before; to be called while no worker is at it."""
        self._progress[:] = 0

    def step(self, options: Mapping[Key, Options], steps: Sequence[float]) -> None:
        """Step all blocks that are not done yet.

        Args:
            options: For each kind of block, such as its learning rate.
            steps: For each block, how many steps its elements have done before.
        """
        with torch.no_grad():
            self._undo_half_done()
            for index in range(int(self._progress[_DONE]), len(self._blocks)):
                block = self._blocks[index]
                self._save(block)
                self._progress[_SAVED] = index + 1
                fail_point("block saved")
                block.step(options[block.key], steps[index])
                fail_point("block stepped")
                self._progress[_DONE] = index + 1
                fail_point("block done")

    def _save(self, block: _OpenBlock) -> None:
        for record, tensor in zip(self._undo, block.tensors, strict=False):  # may have fewer
            record[: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    def _undo_half_done(self) -> None:
        """Put the block back that somebody left half stepped."""
        done, saved = map(int, self._progress)
        if saved == done + 1:
            block = self._blocks[done]
            for record, tensor in zip(self._undo, block.tensors, strict=False):
                tensor.copy_(record[: tensor.nbytes].view(tensor.dtype))


class _OpenBlock:
    """One block with a torch optimizer of the user's class."""

    def __init__(
        self,
        kind: type[Optimizer],
        block: Block,
        pool: SharedMemoryPool,
        options: Mapping[Key, Options],
    ) -> None:
        self.key = block.key
        parameter = nn.Parameter(pool.at(block.values))
        parameter.grad = pool.at(block.gradients)
        self._optimizer = kind([{**options[block.key], "params": [parameter]}])  # type: ignore[call-arg]
        self._optimizer.state.clear()  # Adagrad made some
        self._state: dict[str, Any] = {key: pool.at(place) for key, place in block.state}
        self._optimizer.state[parameter] = self._state
        self.tensors = [parameter.data, *self._state.values()]
        self._counts = torch.zeros(())

    def step(self, options: Options, steps: float) -> None:
        self._optimizer.param_groups[0].update(options)
        self._counts.fill_(steps)
        self._state["step"] = self._counts
        self._optimizer.step()


@dataclass(frozen=True)
class StepShard:
    """A call of a worker: its shard of one step.

    Attributes:
        plan: The worker keeps it under its number; given only when it has not got it.
    """

    number: int
    plan: ShardPlan | None
    options: Mapping[Key, Options]
    steps: tuple[float, ...]

    def __call__(self, worker: Worker) -> None:
        """Do it, in the worker."""
        fail_point("shard taken")
        if self.plan is not None:
            for name in [name for name in worker.saved if name.startswith(_PREFIX)]:
                del worker.saved[name]  # of an earlier plan
            worker.saved[shard_name(self.number)] = OptimizerShard(
                self.plan, worker.pool, self.options
            )
        worker.saved[shard_name(self.number)].step(self.options, self.steps)
        fail_point("shard done")


def shard_name(number: int) -> str:
    """Return under which name a worker saves the shard of plan ``number``."""
    return f"{_PREFIX}{number}"


def plan_shard(
    kind: type[Optimizer],
    owned: Sequence[tuple[Range, Mapping[str, Any]]],
    pool: SharedMemoryPool,
) -> tuple[ShardPlan, list[int]]:
    """Plan the shard whose ranges and state are ``owned``, all of it on ``pool``.

    Returns:
        The plan, and for each block the place in ``owned`` of its range.
    """
    blocks: list[Block] = []
    ranges: list[int] = []
    for place, (where, state) in enumerate(owned):
        moments = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
        for start, stop in _cuts(where.stop - where.start):
            blocks.append(
                Block(
                    group=where.segment.group,
                    values=_placed(pool, where.values[start:stop]),
                    gradients=_placed(pool, where.gradients[start:stop]),
                    state=tuple((k, _placed(pool, v[start:stop])) for k, v in moments.items()),
                )
            )
            ranges.append(place)
    rows = max((1 + len(block.state) for block in blocks), default=0)
    largest = max((_nbytes(block.values) for block in blocks), default=0)
    row, counts = torch.empty(largest, dtype=torch.uint8), torch.empty(2, dtype=torch.int64)
    *record, progress = pool.allocate_like([row] * rows + [counts])
    plan = ShardPlan(
        kind=kind,
        blocks=tuple(blocks),
        undo=tuple(_placed(pool, row) for row in record),
        progress=_placed(pool, progress),
    )
    return plan, ranges


def _cuts(size: int) -> Iterator[tuple[int, int]]:
    stops = [*range(BLOCK_ELEMENTS, size, BLOCK_ELEMENTS), size]
    return zip([0, *stops[:-1]], stops, strict=True)


def _placed(pool: SharedMemoryPool, tensor: Tensor) -> TensorHandle:
    place = pool.handle_of(tensor)
    assert place is not None
    return place


def _nbytes(place: TensorHandle) -> int:
    return place.shape[0] * place.dtype.itemsize
