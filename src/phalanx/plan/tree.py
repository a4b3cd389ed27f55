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
bit in every configuration. The left operand takes the right one: ``left += right``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Node(NamedTuple):
    """One partial sum: the ``index``-th at ``level``; leaves are at level 0."""

    level: int
    index: int  # type: ignore[assignment]  # in place of a tuple's method, which is not needed


class SummationTree(NamedTuple):
    """The fixed binary tree over ``num_leaves`` microbatches, at least 1.

    Example:
        >>> tree = SummationTree(5)
        >>> tree.sibling(Node(0, 1)), tree.sibling(Node(0, 4))
        (Node(level=0, index=0), None)
    """

    num_leaves: int

    @property
    def root(self) -> Node:
        """The node that holds the whole sum."""
        return Node((self.num_leaves - 1).bit_length(), 0)

    def sibling(self, node: Node) -> Node | None:
        """Return the node that is added to ``node``, or None when it rises alone."""
        level, other = node.level, node.index ^ 1
        stands = other << level < self.num_leaves  # its first leaf
        return Node(level, other) if stands else None

    @functools.cache  # noqa: B019 - trees are small, and few
    def way_up(self, node: Node) -> list[tuple[Node, Node | None]]:
        """Return the nodes that the sum at ``node`` passes, each with its sibling.

        The last of them is an operand of the last addition.

        Example:
            >>> [node.level for node, _ in SummationTree(5).way_up(Node(0, 4))]
            [0, 1, 2]
        """
        way = [(node, self.sibling(node))]
        while way[-1][0].level < self.root.level - 1:
            below = way[-1][0]
            node = Node(below.level + 1, below.index >> 1)
            way.append((node, self.sibling(node)))
        return way
