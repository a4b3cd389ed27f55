"""One run over microbatches: the task, those still to be computed, and the results so far.

Gradients are added along the fixed tree, by whichever thread completes a pair.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from phalanx.plan import Node, SummationTree
from phalanx.replicas import (
    MicrobatchRng,
    ProcessRng,
    Replica,
    RngPlan,
    Statistic,
    merge_statistics,
)
from phalanx.torch_internals import foreach_add
from phalanx.types import Nested

T = TypeVar("T")
Gradients = list[Tensor | None]  # by parameter, dense and laid out as it


@dataclass(kw_only=True, slots=True)
class MicrobatchContext:
    """One microbatch in the hands of one replica.

    Attributes:
        replica: The one that computes it.
        index: Which microbatch it is.
        batch: Its rows.
        rng: Its random numbers, entered around the user's code only.
        waiting: The run's sums that are not added yet, as they change; empty in a worker process.
    """

    replica: Replica
    index: int
    batch: Nested
    rng: MicrobatchRng | ProcessRng
    waiting: Mapping[Node, PartialSum | None] = field(default_factory=dict)


class Task(ABC):
    """The work on one microbatch: called by a replica, under the caller's modes.

    Attributes:
        is_backward: Whether it is the backward pass, on its own, of an earlier run (a container's).
            Nothing is taken over from the source then, no buffers are collected, and a closed
            executor runs it, too.
    """

    is_backward: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, context: MicrobatchContext) -> Any:  # Any: the task's own result type
        """Compute the microbatch; leave gradients and buffers in the replica."""


class MicrobatchResult(NamedTuple):
    """The results of one microbatch for a trainer.

    Attributes:
        loss: Its mean loss; 0.0 of a prediction.
        outputs: The module's outputs, detached; None where they were not asked for.
        targets: The microbatch's targets, on the same device.
    """

    loss: float
    outputs: Nested
    targets: Nested


@dataclass
class PartialSum:
    """The contribution of one microbatch, or of several already added, to the step.

    ``kept_alive`` are objects whose memory the gradients use.
    """

    gradients: Gradients
    statistics: dict[str, Statistic]
    kept_alive: tuple[object, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time that a replica took for a microbatch, or (None) for its shard of the step."""

    replica: int
    microbatch: int | None
    start_s: float
    stop_s: float


@dataclass(kw_only=True)
class RunResult:
    """The results of a run over microbatches.

    Attributes:
        results: What the task returned, by microbatch; None for microbatches of weight 0.
        sums: Partial sums that are still to be added, by node of the tree; on ranks, the total.
        replica_of: Which replica here computed each microbatch; -1 for those left out, or run
            elsewhere.
        drew: Whether the model drew random numbers from the microbatches' own generators; known in
            threads only.
    """

    results: list[Any]  # Any: whatever the task returns
    sums: dict[Node, PartialSum | None] = field(default_factory=dict)
    replica_of: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    drew: bool = False

    @property
    def operands(self) -> list[PartialSum]:
        """The last one or two partial sums, left one first, which the caller adds."""
        found = [self.sums[node] for node in sorted(self.sums)]
        return [each for each in found if each is not None]


class TreeSums(Generic[T]):
    """Add values along the tree: each addition in the thread that brings its second operand.

    No thread waits for another. The last addition is left to the caller, who can share it among all
    threads. A leaf of weight 0 is None and does not take part.

    Args:
        add: Returns the sum of a left and a right operand; it may be one of them, changed in place.

    Attributes:
        waiting: The sums that wait for others.
    """

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        self.waiting: dict[Node, T | None] = {}
        self._tree = SummationTree(num_leaves)
        self._add = add
        self._lock = threading.Lock()

    def put(self, node: Node, value: T | None) -> None:
        """Bring the sum of all leaves below ``node``, and add it to what waits for it."""
        *below, (last, _) = self._tree.way_up(node)
        for place, sibling in below:
            if sibling is None:
                continue
            with self._lock:
                if sibling not in self.waiting:
                    self.waiting[place] = value
                    return
                other = self.waiting.pop(sibling)
            left, right = (value, other) if place < sibling else (other, value)
            if left is None or right is None:
                value = right if left is None else left
            else:
                value = self._add(left, right)
        with self._lock:
            self.waiting[last] = value


def nodes_of(leaves: range, num_leaves: int) -> list[Node]:
    """Return the nodes of the tree whose sums a rank holds that has these microbatches."""
    sums: TreeSums[float] = TreeSums(num_leaves, operator.add)
    for leaf in leaves:
        sums.put(Node(0, leaf), 0.0)
    return sorted(sums.waiting)


def add_nodes(num_leaves: int, found: Mapping[Node, T], add: Callable[[T, T], T]) -> T | None:
    """Return the sum of all nodes, added along the tree; None without any.

    Args:
        num_leaves: Of the tree.
        found: Disjoint nodes; leaves below none of them have no sum.
        add: As for `TreeSums`.
    """
    sums: TreeSums[T] = TreeSums(num_leaves, add)
    covered: set[int] = set()
    for node, value in found.items():
        covered |= set(range(node.index << node.level, (node.index + 1) << node.level))
        sums.put(node, value)
    for leaf in set(range(num_leaves)) - covered:
        sums.put(Node(0, leaf), None)
    operands = [sums.waiting[node] for node in sorted(sums.waiting)]
    last = [each for each in operands if each is not None]
    return add(*last) if len(last) == 2 else next(iter(last), None)


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return the sums of both, in the memory of the left ones; None stands for no gradient."""
    both = list(zip(left, right, strict=True))
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    if pairs:
        foreach_add([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in both]


def add_sums(left: PartialSum, right: PartialSum) -> PartialSum:
    """Return the sum of both, in the memory of the left one."""
    # Some of the right one's memory stays in use where the left one lacks something.
    taken_over = (
        any(a is None for a in left.gradients)
        or not right.statistics.keys() <= left.statistics.keys()
    )
    if right.statistics:
        merge_statistics(left.statistics, right.statistics)
    return PartialSum(
        add_gradients(left.gradients, right.gradients),
        left.statistics,
        left.kept_alive + right.kept_alive if taken_over else left.kept_alive,
    )


class RunState:
    """The state of one run, shared by the threads of the executor; arguments as `Executor.run`.

    Args:
        rng: How the microbatches get their random numbers.
        num_replicas: How many take microbatches here.

    Attributes:
        result: Filled by the threads; `Executor.run` stores the partial sums at the end.
        assigned: Attributes that `forward` has assigned; looked for where ``rng`` is watched.
    """

    def __init__(
        self,
        task: Task,
        pieces: Sequence[Nested],
        weights: Sequence[float],
        seed: tuple[int, ...],
        rng: RngPlan,
        num_replicas: int,
        owners: Sequence[int] | None,
        only: range | None,
    ) -> None:
        self.task = task
        self.pieces = pieces
        self.weights = weights
        self.seed = seed
        self.rng = rng
        self.assigned: dict[str, None] = {}
        self.sums = TreeSums(len(pieces), add_sums)
        self.result = RunResult(results=[None] * len(pieces), replica_of=[-1] * len(pieces))
        pending = []
        for index in range(len(pieces)) if only is None else only:
            if weights[index] > 0:
                pending.append(index)
            else:
                self.sums.put(Node(0, index), None)
        self._own = tuple(pending)
        replicas = range(num_replicas)
        self._queues = [pending for _ in replicas]  # one queue, from which the next free one takes
        if owners is not None:
            self._queues = [[each for each in pending if owners[each] == i] for i in replicas]
        self._lock = threading.Lock()
        self._failed = False

    @property
    def is_over(self) -> bool:
        """True when all microbatches are done, or something failed."""
        return self._failed or all(self.result.replica_of[each] >= 0 for each in self._own)

    def next_microbatch(self, replica: int) -> int | None:
        """Return the next microbatch for ``replica``; None when none is left, or one failed."""
        with self._lock:
            queue = self._queues[replica]
            return queue.pop(0) if queue and not self._failed else None

    def give_back(self, microbatch: int, replica: int) -> None:
        """Queue a microbatch again, with which ``replica`` was lost."""
        with self._lock:
            self._queues[replica].append(microbatch)

    def fail(self) -> None:
        """End the run."""
        self._failed = True
