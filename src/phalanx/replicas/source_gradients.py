"""Gradients of a graph that reaches the user's module in the place of its replica.

A replica's parameters are leaves of their own, in the same memory. A loss that uses the module's
parameters (an L2 penalty), or a function that the module keeps and that holds `self` (a lambda, a
method wrapped by `torch.compile` or `torch.vmap`), leads to the module's own leaves. What arrives
there while a replica runs belongs to that replica's microbatch:

    replica's loss ─► replica's parameters ─► `grad`, taken by the replica ─┐
                  └─► module's parameters ──► caught here ──────────────────┴─► added

A hook on the nodes of the module's own leaves does it, so a graph that does not reach them costs
nothing. Outside of a replica's run the hook changes nothing: `grad` of the module is the user's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError

__all__ = ["SourceGradients", "current_replica", "reached_leaves"]


class _RunningReplicas(threading.local):
    """The replicas that this thread runs, the innermost last, and where their gradients go."""

    def __init__(self) -> None:
        self.replicas: list[tuple[int, SourceGradients, dict[int, Tensor]]] = []


_here = _RunningReplicas()


def current_replica() -> int | None:
    """Return the number of the replica that the calling thread runs; None where it runs none.

    Example:
        >>> current_replica() is None
        True
    """
    return _here.replicas[-1][0] if _here.replicas else None


class SourceGradients:
    """What reaches the parameters of the user's own module.

    Args:
        parameters: All parameters of an executor; gradients are told by their index.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        # A node lives as long as somebody holds it, and the hook with it.
        self._nodes: dict[int, torch.autograd.graph.Node] = {}
        self._num_running = 0
        self._lock = threading.Lock()
        for parameter in parameters:
            self.watch(parameter)

    def watch(self, parameter: nn.Parameter) -> None:
        """Begin with a parameter that requires a gradient, if it is not watched yet."""
        index = self._index_of[id(parameter)]
        with self._lock, torch.inference_mode(False):
            if index in self._nodes or not parameter.requires_grad or parameter.is_inference():
                return
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_prehook(partial(_arrived, weakref.ref(self), index))
            self._nodes[index] = node

    def begin(self, replica: int) -> dict[int, Tensor]:
        """Catch, by index, what backward passes in this thread bring until :meth:`end`.

        Until then, ``replica`` is the one that this thread runs.
        """
        caught: dict[int, Tensor] = {}
        with self._lock:
            self._num_running += 1
        _here.replicas.append((replica, self, caught))
        return caught

    def end(self) -> None:
        """Catch no more for who has begun last in this thread."""
        _here.replicas.pop()
        with self._lock:
            self._num_running -= 1

    def arrived(self, index: int, gradient: Tensor | None) -> bool:
        """Catch a gradient; return False for one that no replica's backward pass has brought."""
        for _, own, caught in reversed(_here.replicas):
            if own is self:
                if gradient is not None:
                    _add(caught, index, gradient.detach())
                return True
        if self._num_running and _here.replicas:  # a container in a replica has threads, too
            raise UnsupportedError(
                "A loss or a module must reach the replica's parameters, not the module's own, "
                "where it runs in a container inside of another, but does. "
                "Take them from the module that `forward=` is given, and keep no lambda or wrapped "
                "method that holds `self` in the module."
            )
        return False


def _add(caught: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    """Keep a copy: the engine may go on to write to the gradient."""
    before = caught.get(index)
    caught[index] = gradient.clone() if before is None else before + gradient


# The hook holds the index only: a node that held its owner could never be collected.
def _arrived(
    owner: weakref.ref[SourceGradients],
    index: int,
    gradients: tuple[Tensor | None, ...],
) -> tuple[None, ...] | None:
    found = owner()
    if found is None or not found.arrived(index, gradients[0]):
        return None
    return (None,) * len(gradients)  # nothing is left to be added to `grad`


def reached_leaves(outputs: Iterable[Tensor]) -> set[int] | None:
    """Return the ids of the leaves that a backward pass from ``outputs`` gives a gradient.

    None where a function of the user's own is on the way: its backward pass may reach others.

    Example:
        >>> weight, spare = (torch.ones(3, requires_grad=True) for _ in range(2))
        >>> reached_leaves([(weight * 2).sum()]) == {id(weight)}
        True
    """
    outputs = list(outputs)
    found = {id(each) for each in outputs if each.grad_fn is None}
    waiting = [each.grad_fn for each in outputs if each.grad_fn is not None]
    seen = set(waiting)
    for node in waiting:  # which grows
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return None
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        waiting += new
    return found
