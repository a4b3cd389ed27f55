"""One forward pass over replicas as one node of the caller's autograd graph.

    caller      inputs ─┐                                           ┌─ outputs of piece 0
                        │          (one autograd.Function)          ├─ outputs of piece 1
    piece 0     own inputs ── module ── own outputs ── its graph
    piece 1     own inputs ── module ── own outputs ── its graph

Torch's engine would run all CPU parts of one graph on a single thread. Here every piece of the
inputs has a separate graph, cut off from the caller's, and backward runs each in the thread of
its replica. Cutting the inputs and merging the outputs happens outside, in the caller's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import StateError, UnsupportedError
from phalanx.execution import Gradients, MicrobatchContext, RunResult, Task, ThreadExecutor
from phalanx.plan import copy_rows, flatten, unflatten
from phalanx.replicas import (
    CallerModes,
    Statistics,
    advance_process_generator,
    seed_of_process,
    sum_statistics,
)
from phalanx.torch_internals import keeps_graph, pytree, run_backward
from phalanx.types import Nested

RunPart = Callable[[int, nn.Module, Nested], Nested]  # (piece, module, inputs) -> outputs

_BACKWARD = 1  # sets the seeds of backward passes apart from those of forward passes


class Passes:
    """One forward pass and its backward passes: their seed, and the completion of their sums.

    Attributes:
        only: The pieces that run in this process; None: all.
        spans_ranks: Whether other processes run pieces, which may use other parameters.
    """

    only: range | None = None
    spans_ranks = False

    def seed(self) -> tuple[int, ...]:
        """Return where the random numbers of the next pass start."""
        return (seed_of_process(),)

    def statistics(self, result: RunResult) -> Statistics:
        """Return what all pieces left in the buffers."""
        return sum_statistics(operand.statistics for operand in result.operands)

    def begin_backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Begin a backward pass; return the gradients of the outputs for it."""
        return gradients

    def backward_context(
        self,
        executor: ThreadExecutor,  # noqa: ARG002 - of a subclass, as the others
        context: MicrobatchContext,  # noqa: ARG002
        outputs: Sequence[Tensor],  # noqa: ARG002
    ) -> AbstractContextManager[object]:
        """Return the context of the backward pass of one piece, from ``outputs``."""
        return nullcontext()

    def of_inputs(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the inputs, for the caller's graph."""
        return gradients

    def add_gradients(self, executor: ThreadExecutor, result: RunResult) -> Gradients:
        """Return the sums of the parameters' gradients, as `ThreadExecutor.sum_operands`."""
        return executor.sum_operands(result)


@dataclass(frozen=True)
class ReplicaGraph:
    """The graph of one piece, from its own leaves to the module's outputs.

    Attributes:
        inputs: The leaves that replace the caller's where a gradient is needed.
        homes: The devices of the caller's.
        outputs: The leaves of what the module returned.
        spec: Their structure.
        needing: The places of the outputs that need a gradient.
        reached: The ids of the parameters that a backward pass comes to; None: not looked for.
    """

    inputs: list[Tensor]
    homes: list[torch.device]
    outputs: list[Any]  # Any: leaves of whatever the module returns
    spec: pytree.TreeSpec
    needing: list[int]
    reached: frozenset[int] | None


@dataclass(frozen=True)
class ForwardTask(Task):
    """Run the module on one piece.

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
        own = copy_rows(context.batch, context.replica.device)
        pairs = zip(flatten(own)[0], flatten(context.batch)[0], strict=True)
        home_of = {
            leaf: given.device for leaf, given in pairs if self.records and _needs_gradient(given)
        }
        for leaf in home_of:
            leaf.requires_grad_()
        with context.rng:
            found = self.run(context.index, context.replica.module, own)
        outputs, spec = flatten(found)
        needing = [
            place for place, leaf in enumerate(outputs) if self.records and _needs_gradient(leaf)
        ]
        reached = None
        if self.hooked:
            leaves = reached_leaves([outputs[place] for place in needing])
            reached = None if leaves is None else context.replica.originals_of(leaves)
        graph = ReplicaGraph(list(home_of), list(home_of.values()), outputs, spec, needing, reached)
        return graph, [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs]


@dataclass(frozen=True)
class _BackwardTask(Task):
    """Go back through (a graph, the output gradients by place).

    It leaves the parameters' gradients in the replica and returns those of the inputs.

    Attributes:
        keep_graph: Whether there will be another backward pass.
        entered: Called with the context and the outputs; returns the context manager of the pass.
    """

    is_backward = True

    keep_graph: bool
    entered: Callable[[MicrobatchContext, Sequence[Tensor]], AbstractContextManager[object]]

    def __call__(self, context: MicrobatchContext) -> Gradients:
        """Do it, in the replica's thread."""
        graph: ReplicaGraph
        given: dict[int, Tensor]
        graph, given = context.batch
        outputs = [graph.outputs[place] for place in given]
        # Copies, as `copy_rows` makes of inputs: kernels may choose by the alignment of a slice.
        gradients = [given[place].to(graph.outputs[place].device, copy=True) for place in given]
        try:
            with context.rng, self.entered(context, outputs):
                run_backward(outputs, gradients, keep_graph=self.keep_graph)
            return [leaf.grad for leaf in graph.inputs]
        finally:
            for leaf in graph.inputs:
                leaf.grad = None


def run_pieces(
    executor: ThreadExecutor,
    parts: Sequence[Nested | None],
    run: RunPart,
    weights: Sequence[float],
    owners: Sequence[int] | None,
    passes: Passes,
) -> tuple[list[Nested], RunResult]:
    """Run the module on every part, as one node of the caller's graph.

    Args:
        executor: It runs the parts.
        parts: Nested inputs, one piece of the batch each; None for those that are left out.
        run: The module's forward pass.
        weights: How much each part counts.
        owners: The replica that runs each piece; None: any that is free.
        passes: They complete the sums.

    Returns:
        The outputs of the parts that there are, in order, in the caller's graph where they need
        gradients; and the report of the run.
    """
    records = torch.is_grad_enabled()
    # Of several ranks, none knows before the backward pass what the others have used.
    hooked = (
        records
        and not passes.spans_ranks
        and any(
            each._backward_hooks or each._post_accumulate_grad_hooks for each in executor.parameters
        )
    )
    modes = CallerModes.capture(executor.devices)
    result = executor.run(
        ForwardTask(run, records, hooked),
        parts,
        weights=weights,
        seed=passes.seed(),
        owners=owners,
        only=passes.only,
    )
    graphs: list[ReplicaGraph] = [each[0] for each in result.results if each is not None]
    values: list[list[Any]] = [each[1] for each in result.results if each is not None]
    needing = [(i, place) for i, graph in enumerate(graphs) for place in graph.needing]
    if not needing and records and passes.spans_ranks:
        # These pieces use frozen parameters only; yet the backward pass is all ranks'.
        needing = [
            (i, place)
            for i, own in enumerate(values)
            for place, leaf in enumerate(own)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
    if needing:
        trainable = {id(each) for each in executor.parameters if each.requires_grad}
        reached = [graph.reached for graph in graphs if graph.reached is not None]
        if len(reached) == len(graphs):
            trainable &= frozenset().union(*reached)
        parameters = [each for each in executor.parameters if id(each) in trainable]
        leaves = [
            leaf
            for part in parts
            for leaf in dict.fromkeys(filter(_needs_gradient, flatten(part)[0]))
        ]
        node = _Node(
            executor,
            passes,
            modes,
            [None if each is None else each[0] for each in result.results],
            trainable,
            [max(replica, 0) for replica in result.replica_of],
        )
        connected = _Connect.apply(  # type: ignore[no-untyped-call]
            node, [values[i][place] for i, place in needing], *leaves, *parameters
        )
        for (i, place), tensor in zip(needing, connected, strict=True):
            values[i][place] = tensor
    pairs = zip(values, graphs, strict=True)
    return [unflatten(own, graph.spec) for own, graph in pairs], result


# Any: a leaf of whatever the module takes or returns.
def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


@dataclass
class _Node:
    """The way back through the pieces' graphs.

    Attributes:
        modes: The caller's in the forward pass.
        graphs: By piece; None for a part that was left out, and after a backward pass for all.
        trainable: The ids of the parameters that need a gradient.
        owners: The replica that has the graph of each piece.
    """

    executor: ThreadExecutor
    passes: Passes
    modes: CallerModes
    graphs: list[ReplicaGraph | None]
    trainable: set[int]
    owners: list[int]

    def backward(self, grads: Sequence[Tensor | None], keep_graph: bool) -> Gradients:
        """Return the gradients of the leaves, then of the parameters; replicas go back at once."""
        if not any(self.graphs):
            raise StateError(
                "`backward()` needs the graph of its forward pass, but an earlier `backward()` "
                "has freed it. Call the first one with retain_graph=True."
            )
        arrived = iter(self.passes.begin_backward(grads))
        batches: list[tuple[ReplicaGraph, dict[int, Tensor]] | None] = []
        for graph in self.graphs:
            found = {place: next(arrived) for place in (graph.needing if graph else ())}
            given = {place: grad for place, grad in found.items() if grad is not None}
            batches.append((graph, given) if graph and given else None)
        with torch.enable_grad():  # gradients are asked for
            result = self.executor.run(
                _BackwardTask(keep_graph, partial(self.passes.backward_context, self.executor)),
                batches,
                weights=[float(batch is not None) for batch in batches],
                seed=(*self.passes.seed(), _BACKWARD),
                owners=self.owners,
                only=self.passes.only,
            )
        if result.drew:
            advance_process_generator()
        gradients: Gradients = []
        for graph, own in zip(self.graphs, result.results, strict=True):
            homes = graph.homes if graph else []
            pairs = zip(own or [None] * len(homes), homes, strict=True)
            gradients += [None if each is None else each.to(home) for each, home in pairs]
        if not keep_graph:
            self.graphs = [None] * len(self.graphs)
        gradients = list(self.passes.of_inputs(gradients))
        sums = self.passes.add_gradients(self.executor, result)
        totals = zip(self.executor.parameters, sums, strict=True)
        return gradients + [total for each, total in totals if id(each) in self.trainable]


class _Connect(torch.autograd.Function):
    """The node of all pieces' graphs in the caller's graph."""

    # Any: torch's own signature for the context.
    @staticmethod
    def forward(ctx: Any, node: _Node, values: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.node = node
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
        with ctx.node.modes.on_streams():
            return (None, None, *ctx.node.backward(grads, keep_graph))


def reached_leaves(outputs: Iterable[Tensor]) -> set[int] | None:
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
