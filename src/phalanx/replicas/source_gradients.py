"""Gradients of a graph that reaches the user's module instead of its replica.

A replica's parameters are separate leaves in the same memory. A loss that uses the module's
parameters (an L2 penalty), or a function that the module keeps and that holds `self` (a lambda, a
method wrapped by `torch.compile` or `torch.vmap`), leads to the module's own leaves. Gradients that
arrive there while a replica runs belong to that replica's microbatch:

    replica's loss ─► replica's parameters ─► `grad`, taken by the replica ─┐
                  └─► module's parameters ──► caught here ──────────────────┴─► added

A hook on the nodes of the module's own leaves does it, so a graph that does not reach them costs
nothing. Outside of a replica's run the hook changes nothing: `grad` of the module is the user's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError


class _RunningReplicas(threading.local):
    """The replicas that this thread runs, the innermost last.

    Attributes:
        replicas: The number of each, the parameters that it catches gradients of, and what it has
            caught, by index.
    """

    def __init__(self) -> None:
        self.replicas: list[tuple[int, SourceGradients, dict[int, Tensor]]] = []


_running_here = _RunningReplicas()


def current_replica() -> int | None:
    """Return the number of the replica that the calling thread runs; None where it runs none.

    Example:
        >>> current_replica() is None
        True
    """
    return _running_here.replicas[-1][0] if _running_here.replicas else None


class SourceGradients:
    """Catches the gradients that reach the parameters of the user's own module.

    Args:
        parameters: All parameters of an executor; a gradient goes by the index of its parameter.

    Attributes:
        index_of: Where each parameter stands, by its id.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        # A node lives as long as somebody holds it, and the hook with it.
        self._nodes: dict[int, torch.autograd.graph.Node] = {}
        self._running: list[int] = []  # the replicas that run, in any thread
        self._lock = threading.Lock()
        for parameter in parameters:
            self.watch(parameter)

    def watch(self, parameter: nn.Parameter) -> None:
        """Begin with a parameter that requires a gradient, if it is not watched yet."""
        index = self.index_of[id(parameter)]
        with self._lock, torch.inference_mode(False):
            if index in self._nodes or not parameter.requires_grad or parameter.is_inference():
                return
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_prehook(partial(_catch, weakref.ref(self), index))
            self._nodes[index] = node

    def begin(self, replica: int, caught: dict[int, Tensor]) -> None:
        """Catch, by index, what backward passes in this thread bring while ``replica`` runs."""
        self._running.append(replica)
        _running_here.replicas.append((replica, self, caught))

    def end(self, replica: int) -> None:
        """Catch nothing more for ``replica``, which began last in this thread."""
        _running_here.replicas.pop()
        self._running.remove(replica)


# The hook holds the index only: a node that held its owner could never be collected.
def _catch(
    owner: weakref.ref[SourceGradients], index: int, gradients: tuple[Tensor | None, ...]
) -> tuple[None] | None:
    """Keep a gradient for the replica that runs, and leave none to be added to `grad`."""
    found = owner()
    if found is None:
        return None
    for _, own, caught in reversed(_running_here.replicas):
        if own is found:
            gradient, before = gradients[0], caught.get(index)
            if gradient is not None:  # a copy: the engine may write to it afterwards
                gradient = gradient.detach()
                caught[index] = gradient.clone() if before is None else before + gradient
            return (None,)
    if found._running and _running_here.replicas:  # a thread of a container in one of the replicas
        raise UnsupportedError(
            "A container inside of another must not reach parameters of the outer one's module by "
            "a reference that is kept, but does. Use the module that `forward=` is given, and keep "
            "no function that holds the outer module."
        )
    return None
