"""What replicas do in the passes of a container: forward, and back through the graph of that.

Each replica's graph is its own, cut off from the caller's; the caller's node holds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from phalanx.execution import MicrobatchContext, Task
from phalanx.plan import flatten, unflatten
from phalanx.replicas import Inputs, WatchedInputs, pieces_of, placed, run_backward
from phalanx.torch_internals import pytree
from phalanx.types import Nested

__all__ = ["BackwardTask", "ForwardTask", "Outputs", "ReplicaGraph", "RunPart"]

RunPart = Callable[[int, nn.Module, Nested], Nested]  # (piece, module, inputs) -> outputs


@dataclass(frozen=True)
class ReplicaGraph:
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
        needing: The places of the leaves that need a gradient.
        graph: What they were computed by; None where none needs a gradient.
    """

    nested: Nested
    needing: tuple[int, ...]
    graph: ReplicaGraph | None


@dataclass(frozen=True)
class ForwardTask(Task):
    """Run the module, and return its outputs and their graph.

    A microbatch is the nested inputs, and by leaf whether it needs a gradient.

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
        """Do it, in the replica's thread."""
        nested, wanted = context.batch
        graph = _evaluate(self.run, context, nested, wanted, self.inputs)
        needing = [
            place
            for place, leaf in enumerate(graph.outputs)
            if self.records and _needs_gradient(leaf)
        ]
        nested = unflatten(_detached(graph), graph.spec)
        return Outputs(nested, tuple(needing), graph if needing else None)


@dataclass(frozen=True)
class BackwardTask(Task):
    """Go back through the graph that a `ForwardTask` has returned.

    It leaves the parameters' gradients in the replica and returns those of the inputs. A microbatch
    is the graph, and the output gradients by place.

    Attributes:
        keep_graph: Whether there will be another backward pass.
    """

    goes_back = True

    keep_graph: bool

    def __call__(self, context: MicrobatchContext) -> list[Tensor | None]:
        """Do it, in the replica's thread."""
        graph: ReplicaGraph
        given: dict[int, Tensor]
        graph, given = context.batch
        pairs = [
            (leaf, given[place].to(leaf.device))
            for place, leaf in enumerate(graph.outputs)
            if place in given
        ]
        wanted = [leaf for leaf, w in zip(graph.inputs, graph.wanted, strict=True) if w]
        try:
            if pairs:
                outputs, output_grads = zip(*pairs, strict=True)
                with context.drawing():
                    run_backward(outputs, output_grads, keep_graph=self.keep_graph)
            return [leaf.grad for leaf in wanted]
        finally:
            for leaf in wanted:
                leaf.grad = None


def _evaluate(
    run: RunPart,
    context: MicrobatchContext,
    nested: Nested,
    wanted: list[bool],
    inputs: Inputs | None,
) -> ReplicaGraph:
    """Run the module on inputs of the replica's own: on its device, with a graph of their own."""
    module = context.replica.module
    copies = inputs is not None and inputs.copies(module.training)
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
    if inputs is not None:
        inputs.note(watched)
    return ReplicaGraph(own, wanted, *flatten(outputs))


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _detached(graph: ReplicaGraph) -> list[Any]:
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
