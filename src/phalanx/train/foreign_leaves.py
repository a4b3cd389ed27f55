"""Refuse a loss that, in a worker process, trains a copy of something instead of the module.

A global such as the script's own `net` is another object in every worker process. A loss that uses
it would get numbers of the copy, and leave gradients there, where nobody looks. Leaves that the
model makes in its own pass, such as points at which it takes a slope, end with the pass and are its
own affair.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from phalanx.errors import UnsupportedError

__all__ = ["find_foreign_leaves", "refuse_foreign_leaves"]


def find_foreign_leaves(loss: Tensor, known: Collection[int]) -> list[weakref.ref[Tensor]]:
    """Return the leaves of a graph other than those whose ids are ``known``."""
    return [weakref.ref(leaf) for leaf in _leaves_of(loss) if id(leaf) not in known]


def refuse_foreign_leaves(found: Sequence[weakref.ref[Tensor]]) -> None:
    """Refuse leaves that have outlived the graph that they were found in.

    Raises:
        UnsupportedError: There is one.
    """
    if any(each() is not None for each in found):
        gc.collect()  # cycles would keep those that the pass has made
    for each in found:
        leaf = each()
        if leaf is not None:
            raise UnsupportedError(
                f"The loss must train parameters of `module` only in worker processes, but depends "
                f"on a tensor of shape {tuple(leaf.shape)} that requires a gradient and is none: "
                "a global, say, of which every process has a copy. Take it from the module that "
                "`forward=` is given, make it a part of the module, or freeze it by "
                "`requires_grad_(False)`."
            )


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # the node that adds to a leaf's `grad`
            yield node.variable
        waiting.extend(next_node for next_node, _ in node.next_functions)
