"""What replicas do in the passes of a container: forward, and back through the graph of that.

A replica keeps its graph in `MicrobatchContext.saved` from the forward pass to the backward pass.
One that is new since, because a worker process was lost, is sent the inputs once more with the
output gradients, and repeats the forward pass first: with the same random numbers, buffers and
modes, and so to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.execution import CachedPayload, MicrobatchContext
from phalanx.plan import flatten, unflatten
from phalanx.replicas import (
    CallerModes,
    Inputs,
    WatchedInputs,
    derive_seed,
    pieces_of,
    placed,
    run_backward,
)
from phalanx.torch_internals import pytree
from phalanx.types import Nested

__all__ = ["BackwardTask", "ForwardTask", "GradientPayload", "Outputs", "RunPart"]

RunPart = Callable[[int, nn.Module, Nested], Nested]  # (replica, module, inputs) -> outputs

_BACKWARD = 1  # what sets the seeds of backward passes apart from those of forward passes


@dataclass(frozen=True)
class _Graph:
    """One replica's own graph: its own inputs, and what the module made of them."""

    inputs: list[Any]  # Any: leaves of whatever the module takes and returns
    wanted: list[bool]
    outputs: list[Any]
    spec: pytree.TreeSpec


@dataclass(frozen=True)
class Outputs:
    """What a replica returns of a forward pass.

    Attributes:
        nested: Cut off from the graph.
        needing: The places of the leaves that need a gradient; none if no graph was saved.
    """

    nested: Nested
    needing: tuple[int, ...]


@dataclass(frozen=True)
class ForwardTask:
    """Run the module, and save the graph.

    A microbatch is the name of the graph, the nested inputs, and by leaf whether it needs a
    gradient.

    Attributes:
        run: The module's forward pass.
        records: Whether there will be a backward pass.
        inputs: Gives replicas copies of inputs that the module writes to; None lets it write to the
            caller's, where it can reach them.
    """

    run: RunPart
    records: bool
    inputs: Inputs | None

    def __call__(self, context: MicrobatchContext) -> Outputs:
        """Do it, in the replica's thread or process."""
        name, nested, wanted = context.batch
        graph = _evaluate(self.run, context, nested, wanted, self.inputs)
        needing = [
            place
            for place, leaf in enumerate(graph.outputs)
            if self.records and _needs_gradient(leaf)
        ]
        if needing:
            context.saved[name] = graph
        return Outputs(unflatten(_detached(graph), graph.spec), tuple(needing))


@dataclass(frozen=True)
class GradientPayload(CachedPayload):
    """The output gradients of a backward pass, with their places; and the inputs, where needed."""

    name: str
    gradients: list[tuple[int, Tensor]]
    inputs: Callable[[], tuple[Nested, list[bool]]]

    def for_replica(self, has: bool) -> Nested:
        return self.name, self.gradients, None if has else self.inputs()


@dataclass(frozen=True)
class BackwardTask:
    """Go back through the graph that a `ForwardTask` has saved.

    It leaves the parameters' gradients in the replica and returns those of the inputs.

    Attributes:
        run: The module's forward pass, where it has to be repeated.
        modes: Those of the forward pass.
        keep_graph: Whether there will be another backward pass.
        seed: Where the random numbers of this pass start; the context's is the forward pass's.
        meets: Whether all replicas go back through all of their outputs, as others wait for them.
    """

    run: RunPart
    modes: CallerModes
    keep_graph: bool
    seed: int
    meets: bool

    def __call__(self, context: MicrobatchContext) -> list[Tensor | None]:
        """Do it, in the replica's thread or process."""
        name, gradients, again = context.batch
        if again is not None:
            device = context.replica.device
            with torch.autocast(device.type, enabled=False), self.modes.entered(device):
                context.saved[name] = _evaluate(self.run, context, *again)
            context.rng_use.drew = False  # that pass has told of it before
        graph: _Graph = context.saved[name]
        given = dict(gradients)
        pairs = [
            (leaf, given[place].to(leaf.device) if place in given else torch.zeros_like(leaf))
            for place, leaf in enumerate(graph.outputs)
            if place in given or (self.meets and _needs_gradient(leaf))
        ]
        wanted = [leaf for leaf, w in zip(graph.inputs, graph.wanted, strict=True) if w]
        try:
            if pairs:
                outputs, output_grads = zip(*pairs, strict=True)
                with context.drawing(derive_seed(self.seed, _BACKWARD, context.index)):
                    run_backward(outputs, output_grads, keep_graph=self.keep_graph)
            found = [leaf.grad for leaf in wanted]
        finally:
            for leaf in wanted:
                leaf.grad = None
        if not self.keep_graph:
            del context.saved[name]
        return found


def _evaluate(
    run: RunPart,
    context: MicrobatchContext,
    nested: Nested,
    wanted: list[bool],
    inputs: Inputs | None = None,
) -> _Graph:
    """Run the module on inputs of the replica's own: on its device, with a graph of their own."""
    module = context.replica.module
    watch = None if context.in_worker else inputs  # there they are copies already
    copies = watch is not None and watch.copies(module.training)
    given, spec = flatten(nested)
    own = [
        placed(leaf, context.replica.device, copies) if isinstance(leaf, Tensor) else leaf
        for leaf in given
    ]
    for leaf, w in zip(own, wanted, strict=True):
        if w:
            leaf.requires_grad_()
    tensors = [leaf for leaf in own if isinstance(leaf, Tensor)]
    watched = WatchedInputs(tensors, copies, module.training)
    with context.drawing():
        outputs = run(context.index, module, unflatten(own, spec))
    if watch is not None:
        watch.note(watched)
    return _Graph(own, wanted, *flatten(outputs))


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _detached(graph: _Graph) -> list[Any]:
    """Return the outputs without their graph, and in memory of their own.

    A module may return its input, or a view of it; that memory is the caller's.
    """
    inputs = (leaf for leaf in graph.inputs if isinstance(leaf, Tensor))
    given = {address for leaf in inputs for address in _addresses(leaf)}

    def detached(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach()
        return own.clone() if given.intersection(_addresses(own)) else own

    return [detached(leaf) for leaf in graph.outputs]


def _addresses(tensor: Tensor) -> list[int]:
    return [piece.untyped_storage().data_ptr() for piece in pieces_of(tensor)]
