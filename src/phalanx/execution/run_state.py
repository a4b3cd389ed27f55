"""The state of one run: the microbatches that are left, and what the others gave."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from phalanx.execution.partial_sums import RunResult, TreeSums, add_sums
from phalanx.execution.task import Task
from phalanx.plan import Node, Shares, workload_sizes
from phalanx.replicas import RngPlan
from phalanx.types import Nested

__all__ = ["RunState", "WorkQueue"]


class WorkQueue:
    """The microbatches of a run that nobody has done yet; for any thread.

    Threads only :meth:`take` and :meth:`fail`: a replica that takes a microbatch does it. The
    others are for worker processes, which may be lost with one.

    Args:
        microbatches: Which there are.
        shares: Whose they are, by place.
        active: Which replicas may take what was brought back; not those that are switched off.
    """

    def __init__(self, microbatches: Sequence[int], shares: Shares, active: Sequence[bool]) -> None:
        self._microbatches = microbatches
        self._shares = shares
        self._active = active
        self._changed = threading.Condition()
        self._returned: list[int] = []
        self._left = len(microbatches)
        self._failed = False

    @property
    def over(self) -> bool:
        """Whether all were counted as done, or something failed."""
        return self._left == 0 or self._failed

    def take(self, replica: int, wait_s: float = 0.0) -> int | None:
        """Return the next microbatch for ``replica``; None when none is left, or one failed.

        Args:
            wait_s: How long to wait for one that is brought back.
        """
        with self._changed:
            place = None if self._failed else self._shares.take(replica)
            if place is not None:
                return self._microbatches[place]
            returned = self._returned if self._active[replica] else []
            if wait_s and not returned and not self.over:
                self._changed.wait(wait_s)
            return returned.pop(0) if returned and not self._failed else None

    def give_back(self, microbatch: int) -> None:
        """Let another one compute it."""
        with self._changed:
            self._returned.append(microbatch)
            self._changed.notify_all()

    def leave_to_others(self, replica: int) -> None:
        """Give the share of ``replica`` to whoever is free."""
        with self._changed:
            while (place := self._shares.take(replica)) is not None:
                self._returned.append(self._microbatches[place])
                self._changed.notify_all()

    def count(self) -> None:
        """One more is done."""
        with self._changed:
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def fail(self) -> None:
        """End the run."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class RunState:
    """The state of one run, shared by the threads of the executor; arguments as `Executor.run`.

    Args:
        rng: How the microbatches get their random numbers.
        workloads: The replicas' relative shares.

    Attributes:
        result: Filled by whoever computes; without the sums.
        assigned: Names of attributes; looked for where ``rng`` is watched.
    """

    def __init__(
        self,
        task: Task,
        pieces: Sequence[Nested],
        weights: Sequence[float],
        seed: tuple[int, ...],
        rng: RngPlan,
        workloads: Sequence[float],
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
        left = []
        for index in range(len(pieces)) if only is None else only:
            if weights[index] > 0:
                left.append(index)
            else:
                self.sums.put(Node(0, index), None)
        if owners is None:
            shares = Shares(workload_sizes(len(left), workloads))
        else:
            left.sort(key=lambda index: (owners[index], index))
            counts = Counter(owners[index] for index in left)
            shares = Shares([counts[each] for each in range(len(workloads))], stealing=False)
        self.queue = WorkQueue(left, shares, [workload > 0 for workload in workloads])
