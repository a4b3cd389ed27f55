"""The summation tree: which two partial sums are added, whoever holds them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan import Node, SummationTree

leaf_counts = st.integers(1, 70)

# A sum written as nested pairs: (left, right) is left += right.
EXPRESSIONS: list[tuple[int, Any]] = [
    (1, 0),
    (2, (0, 1)),
    (3, ((0, 1), 2)),
    (4, ((0, 1), (2, 3))),
    (5, (((0, 1), (2, 3)), 4)),
    (6, (((0, 1), (2, 3)), (4, 5))),
    (7, (((0, 1), (2, 3)), ((4, 5), 6))),
    (8, (((0, 1), (2, 3)), ((4, 5), (6, 7)))),
    (9, ((((0, 1), (2, 3)), ((4, 5), (6, 7))), 8)),
]


def additions(tree: SummationTree) -> list[tuple[Node, Node]]:
    """Return every addition as (left, right), lowest level first."""
    return [
        (Node(level, index), Node(level, index + 1))
        for level in range(tree.root.level)
        for index in range(0, -(-tree.num_leaves // (1 << level)) - 1, 2)
    ]


def written_out(num_leaves: int) -> Any:
    """Follow the plan's additions from the lowest level up."""
    tree = SummationTree(num_leaves)
    held: dict[Node, Any] = {Node(0, leaf): leaf for leaf in range(num_leaves)}
    for left, right in additions(tree):
        held[Node(left.level + 1, left.index >> 1)] = (_risen(held, left), _risen(held, right))
    return _risen(held, tree.root)


def _risen(held: dict[Node, Any], node: Node) -> Any:
    """Return what stands at ``node``: put there, or risen alone from below."""
    while node not in held:
        node = Node(node.level - 1, node.index * 2)
    return held[node]


def as_they_come(num_leaves: int, order: list[int]) -> Any:
    """Add each leaf when it arrives, as far up as its siblings are there already."""
    tree = SummationTree(num_leaves)
    waiting: dict[Node, Any] = {}
    for leaf in order:
        node, value = Node(0, leaf), leaf
        while node != tree.root:
            sibling = tree.sibling(node)
            if sibling is not None:
                if sibling not in waiting:
                    break
                other = waiting.pop(sibling)
                value = (value, other) if node.index < sibling.index else (other, value)
            node = Node(node.level + 1, node.index >> 1)
        waiting[node] = value
    assert list(waiting) == [tree.root]
    return waiting[tree.root]


def leaves_of(expression: Any) -> list[int]:
    if isinstance(expression, int):
        return [expression]
    return leaves_of(expression[0]) + leaves_of(expression[1])


def depth_of(expression: Any) -> int:
    return 0 if isinstance(expression, int) else 1 + max(map(depth_of, expression))


@pytest.mark.parametrize(("num_leaves", "expression"), EXPRESSIONS)
def test_the_order_of_additions(num_leaves: int, expression: Any) -> None:
    assert written_out(num_leaves) == expression


@given(leaf_counts)
def test_every_leaf_is_added_once_and_in_order(num_leaves: int) -> None:
    assert leaves_of(written_out(num_leaves)) == list(range(num_leaves))
    assert len(additions(SummationTree(num_leaves))) == num_leaves - 1


@given(leaf_counts)
def test_the_tree_is_as_flat_as_can_be(num_leaves: int) -> None:
    assert depth_of(written_out(num_leaves)) == (num_leaves - 1).bit_length()


@given(st.data())
def test_the_order_of_arrival_does_not_show(data: st.DataObject) -> None:
    num_leaves = data.draw(leaf_counts)
    order = data.draw(st.permutations(range(num_leaves)))
    assert as_they_come(num_leaves, order) == written_out(num_leaves)
