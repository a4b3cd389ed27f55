"""One forward pass over replicas as one node of the caller's autograd graph.

    caller      inputs ─┐                                           ┌─ outputs of piece 0
                        │          (one autograd.Function)          ├─ outputs of piece 1
    piece 0     own inputs ── module ── own outputs ── its graph
    piece 1     own inputs ── module ── own outputs ── its graph

Torch's engine would run all CPU parts of one graph on a single thread. Here every piece of the
inputs has a graph of its own, cut off from the caller's, and backward runs each in the thread of
its replica. Cutting the inputs and merging the outputs happens outside, in the caller's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from phalanx.errors import StateError, UnsupportedError
from phalanx.execution import Gradients, MicrobatchContext, RunResult, Task, ThreadExecutor
from phalanx.memory import dense_strides
from phalanx.plan import copy_rows, flatten, unflatten
from phalanx.replicas import (
    CallerModes,
    advance_process_generator,
    seed_of_process,
)
from phalanx.torch_internals import (
    in_forward_mode,
    in_func_transform,
    keeps_graph,
    pytree,
    run_backward,
)
from phalanx.types import Nested

__all__ = ["ForwardTask", "Graph", "ReplicaGraph", "RunPart", "refuse_transforms"]

RunPart = Callable[[int, nn.Module, Nested], Nested]  # (piece, module, inputs) -> outputs

_BACKWARD = 1  # sets the seeds of backward passes apart from those of forward passes


@dataclass(frozen=True)
class ReplicaGraph:
    """The graph of one piece: inputs of its own, and the module's outputs.

    Attributes:
        wanted: By input leaf, whether it shall have a gradient.
        spec: The structure of the outputs.
        needing: The places of the output leaves that need a gradient.
        reached: The ids of the parameters that a backward pass comes to; None: not looked for.
    """

    inputs: list[Any]  # Any: leaves of whatever the module takes and returns
    wanted: list[bool]
    outputs: list[Any]
    spec: pytree.TreeSpec
    needing: tuple[int, ...]
    reached: frozenset[int] | None


@dataclass(frozen=True)
class ForwardTask(Task):
    """Run the module on (nested inputs, by leaf whether it shall have a gradient).

    It returns the graph, and the leaves of the outputs cut off from it.

    Attributes:
        run: The module's forward pass.
        records: Whether there will be a backward pass.
        hooked: Whether a parameter has hooks, which are not to be called without a gradient.
    """

    run: RunPart
    records: bool
    hooked: bool = False

    def __call__(self, context: MicrobatchContext) -> tuple[ReplicaGraph, list[Any]]:
        """Do it, in the replica's thread."""
        nested, wanted = context.batch
        own, spec = flatten(copy_rows(nested, context.replica.device))
        for leaf, wants in zip(own, wanted, strict=True):
            if wants:
                leaf.requires_grad_()
        with context.rng:
            found = self.run(context.index, context.replica.module, unflatten(own, spec))
        outputs, spec = flatten(found)
        needing = tuple(
            place
            for place, leaf in enumerate(outputs)
            if self.records and isinstance(leaf, Tensor) and leaf.requires_grad
        )
        reached = None
        if self.hooked:
            leaves = _reached_leaves([outputs[place] for place in needing])
            reached = None if leaves is None else context.replica.originals_of(leaves)
        return ReplicaGraph(own, wanted, outputs, spec, needing, reached), [
            _detached(leaf) for leaf in outputs
        ]


@dataclass(frozen=True)
class _BackwardTask(Task):
    """Go back through (a graph, the output gradients by place).

    It leaves the parameters' gradients in the replica and returns those of the inputs.

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
        wanted = [leaf for leaf, wants in zip(graph.inputs, graph.wanted, strict=True) if wants]
        outputs = [graph.outputs[place] for place in given]
        gradients = [given[place].to(graph.outputs[place].device) for place in given]
        try:
            if outputs:
                with context.rng:
                    run_backward(outputs, gradients, keep_graph=self.keep_graph)
            return [leaf.grad for leaf in wanted]
        finally:
            for leaf in wanted:
                leaf.grad = None


@dataclass
class _Piece:
    """One piece of the caller's inputs, leaf by leaf, and its graph until that is freed.

    Attributes:
        wanted: Which leaves shall have a gradient.
    """

    leaves: list[Any]  # Any: whatever the module takes
    spec: pytree.TreeSpec
    wanted: list[bool]
    graph: ReplicaGraph | None = None

    @classmethod
    def of(cls, part: Nested, records: bool) -> _Piece:
        leaves, spec = flatten(part)
        wanted = [records and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        return cls(leaves, spec, wanted)

    def cut_off(self) -> tuple[Nested, list[bool]]:
        """Return the inputs without the caller's graph, and which shall have a gradient."""
        leaves = [each.detach() if isinstance(each, Tensor) else each for each in self.leaves]
        return unflatten(leaves, self.spec), self.wanted

    def leaves_with_gradient(self) -> list[Tensor]:
        return [leaf for leaf, wants in zip(self.leaves, self.wanted, strict=True) if wants]


class Graph:
    """The pieces' graphs of one forward pass, and their node in the caller's graph.

    Args:
        executor: It runs the parts.
        parts: Nested inputs, one piece of the batch each; None for those that are left out.
        run: The module's forward pass.
        owners: The replica that runs each piece; None: whoever is free.

    Attributes:
        modes: The caller's in the forward pass.

    Raises:
        UnsupportedError: In forward-mode differentiation.
    """

    def __init__(
        self,
        executor: ThreadExecutor,
        parts: Sequence[Nested | None],
        run: RunPart,
        *,
        owners: Sequence[int] | None,
    ) -> None:
        _refuse_tangents(executor.parameters, parts)
        self._executor = executor
        records = torch.is_grad_enabled()
        hooked = records and any(map(_has_hooks, executor.parameters))
        self._task = ForwardTask(run, records, hooked)
        self._owners = owners
        self.modes = CallerModes.capture(executor.devices)
        self._pieces = [
            None if part is None else _Piece.of(part, self._task.records) for part in parts
        ]
        self._trainable = {id(p) for p in executor.parameters if p.requires_grad}
        self._connected: list[tuple[int, int]] = []  # (piece, place) of outputs in the graph

    # -- forward -----------------------------------------------------

    def forward(self, weights: Sequence[float]) -> RunResult:
        """Run the module on every part; ``weights`` say how much each counts."""
        batches = [None if piece is None else piece.cut_off() for piece in self._pieces]
        result = self._executor.run(
            self._task, batches, weights=weights, seed=(seed_of_process(),), owners=self._owners
        )
        self._owners = [max(replica, 0) for replica in result.replica_of]  # they have the graphs
        return result

    def outputs(self, result: RunResult) -> list[Nested]:
        """Return the pieces' outputs, in the caller's graph where they need gradients."""
        found: dict[int, tuple[ReplicaGraph, list[Any]]] = {}
        for index, piece in enumerate(self._pieces):
            if piece is not None:
                graph, values = found[index] = result.results[index]
                piece.graph = graph if graph.needing else None
                self._connected += [(index, place) for place in graph.needing]
        reached = [graph.reached for graph, _ in found.values()]
        if self._task.hooked and None not in reached:
            self._trainable &= {each for ids in reached if ids is not None for each in ids}
        if self._connected:
            values = [found[index][1][place] for index, place in self._connected]
            connected = _Connect.apply(self, values, *self._tensors())  # type: ignore[no-untyped-call]
            for (index, place), tensor in zip(self._connected, connected, strict=True):
                found[index][1][place] = tensor
        return [unflatten(values, graph.spec) for graph, values in found.values()]

    def _given(self) -> list[_Piece]:
        return [piece for piece in self._pieces if piece is not None]

    def _tensors(self) -> list[Tensor]:
        """Return the caller's tensors that need gradients: input leaves first, then parameters."""
        leaves = [leaf for piece in self._given() for leaf in piece.leaves_with_gradient()]
        return leaves + [p for p in self._executor.parameters if id(p) in self._trainable]

    # -- backward ----------------------------------------------------

    def backward(self, grads: Sequence[Tensor | None], keep_graph: bool) -> Gradients:
        """Return the gradients of :meth:`_tensors`; each replica goes back through its graphs."""
        if not any(piece.graph for piece in self._given()):
            raise StateError(
                "`backward()` needs the graph of its forward pass, but an earlier `backward()` "
                "has freed it. Call the first one with retain_graph=True."
            )
        given: dict[int, dict[int, Tensor]] = {}
        for (index, place), grad in zip(self._connected, grads, strict=True):
            if grad is not None:
                given.setdefault(index, {})[place] = grad
        result = self._run_backward(given, keep_graph)
        if result.drew:
            advance_process_generator()
        gradients = self._input_gradients(result) + self._parameter_gradients(result)
        if not keep_graph:
            for piece in self._given():
                piece.graph = None
        return gradients

    def _run_backward(self, given: dict[int, dict[int, Tensor]], keep_graph: bool) -> RunResult:
        """Run the backward pass of the pieces whose outputs got a gradient."""
        batches = [
            (piece.graph, given[index]) if piece is not None and index in given else None
            for index, piece in enumerate(self._pieces)
        ]
        with torch.enable_grad():  # gradients are asked for
            return self._executor.run(
                _BackwardTask(keep_graph),
                batches,
                weights=[float(batch is not None) for batch in batches],
                seed=(seed_of_process(), _BACKWARD),
                owners=self._owners,
            )

    def _input_gradients(self, result: RunResult) -> Gradients:
        gradients: Gradients = []
        for index, piece in enumerate(self._pieces):
            leaves = [] if piece is None else piece.leaves_with_gradient()
            found = result.results[index] or [None] * len(leaves)
            pairs = zip(leaves, found, strict=True)
            gradients += [None if own is None else own.to(leaf.device) for leaf, own in pairs]
        return gradients

    def _parameter_gradients(self, result: RunResult) -> Gradients:
        """Return the sums for those parameters that autograd asks for."""
        sums = self._executor.add_gradients(result)
        return [
            None if total is None else total.as_strided(parameter.shape, dense_strides(parameter))
            for parameter, total in zip(self._executor.parameters, sums, strict=True)
            if id(parameter) in self._trainable
        ]


class _Connect(torch.autograd.Function):
    """The node of all pieces' graphs in the caller's graph."""

    # Any: torch's own signature for the context.
    @staticmethod
    def forward(ctx: Any, graph: Graph, values: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "A container must be differentiated once only, but double backward "
                "(create_graph=True) was asked for. Use the unwrapped module for second "
                "derivatives."
            )
        keep_graph = keeps_graph()
        with ctx.graph.modes.on_streams():
            return (None, None, *ctx.graph.backward(grads, keep_graph))


# Any: a leaf of whatever the module returns.
def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def refuse_transforms() -> None:
    """Refuse a call in a transform of `torch.func`, which follows tensors by their thread.

    Raises:
        UnsupportedError: It is in one.
    """
    if in_func_transform():
        raise UnsupportedError(
            "A container must be called outside of `torch.func`'s transforms (`grad`, `vmap`, "
            "`jvp`, …), but is called in one. Use the unwrapped module there."
        )


def _refuse_tangents(parameters: Sequence[Tensor], parts: Sequence[Nested | None]) -> None:
    if not in_forward_mode():
        return
    leaves = [leaf for part in parts if part is not None for leaf in flatten(part)[0]]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(parameters)
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedError(
            "A container must be differentiated backward, but got a tensor with a tangent "
            "(forward-mode differentiation). Use the unwrapped module for it."
        )


def _reached_leaves(outputs: Iterable[Tensor]) -> set[int] | None:
    """Return the ids of the leaves that a backward pass from ``outputs`` gives a gradient.

    None where a function of the user's own is on the way: its backward pass may reach others.
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
