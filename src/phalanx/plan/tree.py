"""The order in which the partial sums of microbatches are added.

Neighbours are added pair by pair, level by level; an odd one out rises unchanged:

    level 0    0   1   2   3   4
                \\ /     \\ /    |
    level 1      0       1     2
                  \\     /      |
    level 2          0         1
                       \\     /
    level 3              0          (the root)

The tree depends on the number of microbatches alone, never on who computed them or who was faster.
That, and one fixed number of threads inside each operator, is what makes the sum the same to the
bit in every formation. The left operand takes the right one: ``left += right``.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigError

__all__ = ["Node", "SummationTree"]


@dataclass(frozen=True, order=True)
class Node:
    """One partial sum: the ``index``-th at ``level``; leaves are at level 0."""

    level: int
    index: int


@dataclass(frozen=True)
class SummationTree:
    """The fixed binary tree over ``num_leaves`` microbatches.

    Example:
        >>> tree = SummationTree(5)
        >>> tree.sibling(Node(0, 1)), tree.sibling(Node(0, 4))
        (Node(level=0, index=0), None)
        >>> tree.additions()[:1]
        [(Node(level=0, index=0), Node(level=0, index=1))]

    Raises:
        ConfigError: ``num_leaves`` is less than 1.
    """

    num_leaves: int

    def __post_init__(self) -> None:
        if self.num_leaves < 1:
            raise ConfigError(f"`num_leaves` must be at least 1, but is {self.num_leaves!r}.")

    @property
    def root(self) -> Node:
        """The node that holds the whole sum."""
        return Node((self.num_leaves - 1).bit_length(), 0)

    def width(self, level: int) -> int:
        """Return how many nodes stand at ``level``."""
        return -(-self.num_leaves // (1 << level))

    def sibling(self, node: Node) -> Node | None:
        """Return the node that is added to ``node``, or None when it rises alone."""
        other = node.index ^ 1
        return Node(node.level, other) if other < self.width(node.level) else None

    def parent(self, node: Node) -> Node:
        """Return the node that holds ``node`` plus its sibling."""
        return Node(node.level + 1, node.index >> 1)

    def additions(self) -> list[tuple[Node, Node]]:
        """Return every addition as (left, right), lowest level first."""
        return [
            (Node(level, index), Node(level, index + 1))
            for level in range(self.root.level)
            for index in range(0, self.width(level) - 1, 2)
        ]
