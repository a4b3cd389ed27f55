"""Partial sums of one step, added along the fixed tree by whichever thread completes a pair."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from phalanx.plan import Node, SummationTree
from phalanx.replicas.replica import add_gradients
from phalanx.replicas.statistics import Statistic, merge_statistics

__all__ = ["Partial", "PartialSums"]


@dataclass
class Partial:
    """What one microbatch, or several already added, contribute to the step.

    ``owners`` are kept alive as long as their memory is in use here.
    """

    gradients: list[Tensor | None]
    statistics: dict[str, Statistic]
    owners: tuple[object, ...] = ()


class PartialSums:
    """Wait for both operands of an addition, then let the thread that brought the second one add.

    The last addition is left to the caller, who has all threads at hand to share it.
    A leaf without rows is None and does not take part.
    """

    def __init__(self, num_leaves: int) -> None:
        self._tree = SummationTree(num_leaves)
        self._lock = threading.Lock()
        self._waiting: dict[Node, Partial | None] = {}

    def put(self, leaf: int, value: Partial | None) -> None:
        """Bring the sum of ``leaf``, and add it to what waits for it."""
        node = Node(0, leaf)
        while True:
            sibling = self._tree.sibling(node)
            with self._lock:
                last = node == self._tree.root or self._tree.parent(node) == self._tree.root
                if last or (sibling is not None and sibling not in self._waiting):
                    self._waiting[node] = value
                    return
                other = None if sibling is None else self._waiting.pop(sibling)
            value = _add(value, other) if node.index % 2 == 0 else _add(other, value)
            node = self._tree.parent(node)

    def operands(self) -> list[Partial]:
        """Return the one or two sums that are left when all leaves were put, left one first."""
        return [
            value
            for _, value in sorted(self._waiting.items(), key=lambda item: item[0])
            if value is not None
        ]


def _add(left: Partial | None, right: Partial | None) -> Partial | None:
    if left is None or right is None:
        return right if left is None else left
    taken_over = any(a is None for a in left.gradients)  # some of the right one's stay in use
    return Partial(
        add_gradients(left.gradients, right.gradients),
        merge_statistics(left.statistics, right.statistics),
        left.owners + right.owners if taken_over else left.owners,
    )
