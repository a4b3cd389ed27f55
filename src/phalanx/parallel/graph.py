"""One forward pass over replicas as one node of the caller's autograd graph.

    caller      leaves ──┐                                 ┌── merged outputs
                         │  (one autograd.Function)        │
    replica 0   leaf part ── module ── output part ── graph kept here
    replica 1   leaf part ── module ── output part ── graph kept here

Torch's engine would run all CPU parts of one graph on a single thread. Here every replica's part is
a graph of its own, cut off from the caller's, and backward runs each on its replica's thread again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import StateError, UnsupportedError
from phalanx.memory import dense_strides
from phalanx.plan import Layout, flatten, join, overlaps, part_bounds, unflatten
from phalanx.replicas import Partial, PartialSums, ThreadCrew, Turn, blame
from phalanx.types import Nested

__all__ = ["Call", "ReplicaGraph"]

_BLOCK = 64


class Call:
    """The arguments of one call as one nested value, positions by number and keywords by name."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.num_args = len(args)
        self.leaves: Nested = {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}

    def split(self, leaves: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments again."""
        values = list(leaves.values())
        return values[: self.num_args], dict(list(leaves.items())[self.num_args :])


@dataclass
class _Part:
    """One replica's own graph: its detached inputs and what the module made of them."""

    turn: Turn
    inputs: list[Any]
    outputs: list[Any]
    nested: Nested


class ReplicaGraph:
    """The replicas' graphs of one forward pass, and their node in the caller's graph."""

    def __init__(self, crew: ThreadCrew, call: Call, layout: Layout) -> None:
        self._crew = crew
        self._call = call
        self._leaves, _ = flatten(call.leaves)
        self._dims = layout.dims_of(call.leaves)
        self._records = torch.is_grad_enabled()
        self._wanted = [
            self._records and isinstance(leaf, Tensor) and leaf.requires_grad
            for leaf in self._leaves
        ]
        self._trainable = {id(p) for p in crew.module.parameters() if p.requires_grad}
        self._parts: dict[int, _Part] = {}
        self._merged: list[Any] = []
        self._sizes: list[int] = []
        self.differentiable: list[int] = []

    def inputs_of(self, turn: Turn) -> tuple[list[Any], dict[str, Any]]:
        """Return the replica's arguments: on its device, cut off from the caller's graph."""
        leaves, spec = flatten(turn.batch)
        own = [
            _own_leaf(leaf, turn.replica.device, wanted)
            for leaf, wanted in zip(leaves, self._wanted, strict=True)
        ]
        self._parts[turn.index] = _Part(turn, own, [], None)
        return self._call.split(unflatten(own, spec))

    def keep_outputs(self, turn: Turn, outputs: Nested) -> None:
        """Keep what the replica's module returned, with its graph."""
        part = self._parts[turn.index]
        part.nested = outputs
        part.outputs, _ = flatten(outputs)

    def merge(self, sizes: Sequence[int]) -> Nested:
        """Return the merged outputs, connected to the caller's graph where they need gradients."""
        parts = [self._parts[index] for index in sorted(self._parts)]
        self._sizes = list(sizes)
        home = self._crew.devices[0]
        with torch.no_grad():
            merged = join([_detached(part.nested, home) for part in parts], sizes)
        leaves, spec = flatten(merged)
        self.differentiable = [
            place
            for place in range(len(leaves))
            if any(
                isinstance(p.outputs[place], Tensor) and p.outputs[place].requires_grad
                for p in parts
            )
        ]
        if not (self._records and self.differentiable):
            return merged
        self._merged = [leaves[place] for place in self.differentiable]
        connected = _Connect.apply(self, *self._tensors())  # type: ignore[no-untyped-call]
        for place, tensor in zip(self.differentiable, connected, strict=True):
            leaves[place] = tensor
        return unflatten(leaves, spec)

    def take_merged(self) -> tuple[Tensor, ...]:
        """Hand the merged tensors over to the node that returns them."""
        merged, self._merged = tuple(self._merged), []
        return merged

    def backward(self, grads: Sequence[Tensor | None], keep_graph: bool) -> list[Tensor | None]:
        """Run every replica's backward pass and return the gradients of :meth:`_tensors`."""
        if not self._parts:
            raise StateError(
                "`backward()` needs the graph of its forward pass, but an earlier `backward()` "
                "has freed it. Call the first one with retain_graph=True."
            )
        indices = sorted(self._parts)
        sums = PartialSums(len(indices))

        def work(replica: int) -> None:
            for place, index in enumerate(indices):
                part = self._parts[index]
                if part.turn.replica.index == replica:
                    part_grads = self._grads_of_part(place, grads)
                    sums.put(place, self._backward_of_part(part, part_grads, keep_graph))

        self._crew.each(work)
        result = self._input_gradients(indices) + self._parameter_gradients(sums.operands())
        if not keep_graph:
            self._parts = {}
        return result

    def _tensors(self) -> list[Tensor]:
        """Return the caller's tensors that need gradients: input leaves first, then parameters."""
        leaves = [leaf for leaf, wanted in zip(self._leaves, self._wanted, strict=True) if wanted]
        return leaves + [p for p in self._crew.module.parameters() if id(p) in self._trainable]

    def _grads_of_part(self, place: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        start = sum(self._sizes[:place])
        parts: list[Tensor | None] = []
        for output, grad in zip(self.differentiable, grads, strict=True):
            like = next(iter(self._parts.values())).outputs[output]
            if grad is None:
                parts.append(None)
            elif like.dim() == 0:
                parts.append(grad[place])
            else:
                parts.append(grad.narrow(0, start, self._sizes[place]))
        return parts

    def _backward_of_part(
        self, part: _Part, grads: Sequence[Tensor | None], keep_graph: bool
    ) -> Partial:
        replica = part.turn.replica
        pairs = [
            (part.outputs[output], grad.to(replica.device))
            for output, grad in zip(self.differentiable, grads, strict=True)
            if grad is not None and part.outputs[output].requires_grad
        ]
        try:
            if pairs:
                outputs, output_grads = zip(*pairs, strict=True)
                torch.autograd.backward(outputs, output_grads, retain_graph=keep_graph)
            return Partial(replica.take_gradients(), {})
        except BaseException as error:
            replica.drop_gradients()
            blame(error, replica, part.turn.index)
            raise

    def _input_gradients(self, indices: Sequence[int]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for place, (leaf, wanted) in enumerate(zip(self._leaves, self._wanted, strict=True)):
            if wanted:
                owns = [self._parts[index].inputs[place] for index in indices]
                gradients.append(_merge_input_gradient(leaf, owns, self._dims[place]))
                for own in owns:
                    own.grad = None
        return gradients

    def _parameter_gradients(self, operands: Sequence[Partial]) -> list[Tensor | None]:
        """Add the last two partial sums, every thread its share of the elements."""
        sums = operands[0].gradients
        if len(operands) == 2:
            sums = self._add_shared(sums, operands[1].gradients)
        return [
            None if total is None else total.as_strided(parameter.shape, dense_strides(parameter))
            for total, parameter in zip(sums, self._crew.module.parameters(), strict=True)
            if id(parameter) in self._trainable
        ]

    def _add_shared(
        self, left: list[Tensor | None], right: list[Tensor | None]
    ) -> list[Tensor | None]:
        pairs = [
            (a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None
        ]
        sizes = [a.numel() for a, _ in pairs]
        starts = [stop - size for stop, size in zip(accumulate(sizes), sizes, strict=True)]
        bounds = part_bounds(sum(sizes), len(self._crew), _BLOCK)

        def add(index: int) -> None:
            for pair, start, stop in overlaps(starts, sizes, *bounds[index]):
                a, b = pairs[pair]
                a[start:stop].add_(b[start:stop])

        self._crew.each(add)
        return [b if a is None else a for a, b in zip(left, right, strict=True)]


class _Connect(torch.autograd.Function):
    """Stands in the caller's graph for all replicas' graphs."""

    # Any: torch's own signature for the context.
    @staticmethod
    def forward(ctx: Any, graph: ReplicaGraph, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return graph.take_merged()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "`DataParallel` must be differentiated once only, but double backward "
                "(create_graph=True) was asked for. Use the unwrapped module for second "
                "derivatives."
            )
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, *ctx.graph.backward(grads, keep_graph))


# Any: a leaf of the user's own inputs.
def _own_leaf(leaf: Any, device: torch.device, wanted: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # `data`, not `detach()`: slices of one tensor must not share a version counter over threads.
    own = leaf.data.to(device, non_blocking=True)
    return own.requires_grad_() if wanted else own


def _detached(value: Nested, home: torch.device) -> Nested:
    leaves, spec = flatten(value)
    return unflatten(
        [leaf.detach().to(home) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )


def _merge_input_gradient(leaf: Tensor, owns: Sequence[Tensor], dim: int | None) -> Tensor | None:
    """Concatenate the parts' gradients; a leaf that was given whole gets their sum, in order."""
    if all(own.grad is None for own in owns):
        return None
    gradients = [
        (torch.zeros_like(own) if own.grad is None else own.grad).to(leaf.device) for own in owns
    ]
    if dim is not None:
        return torch.cat(gradients, dim)
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total
