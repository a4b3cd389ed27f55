"""One forward pass over replicas as one node of the caller's autograd graph.

    caller      inputs ─┐                                           ┌─ outputs of replica 0
                        │          (one autograd.Function)          ├─ outputs of replica 1
    replica 0   own inputs ── module ── own outputs ── graph kept there
    replica 1   own inputs ── module ── own outputs ── graph kept there

Torch's engine would run all CPU parts of one graph on a single thread. Here every replica's part is
a graph of its own, cut off from the caller's, and backward runs each in its replica again. How
inputs are cut and outputs merged is not known here: that happens outside, in the caller's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from phalanx.errors import StateError, UnsupportedError
from phalanx.execution import Gradients, RunResult, ThreadExecutor
from phalanx.memory import dense_strides
from phalanx.parallel.tasks import BackwardTask, ForwardTask, Outputs, ReplicaGraph, RunPart
from phalanx.plan import flatten, unflatten
from phalanx.replicas import (
    CallerModes,
    Inputs,
    advance_process_generator,
    seed_of_process,
)
from phalanx.torch_internals import (
    in_forward_mode,
    in_func_transform,
    keeps_graph,
    pytree,
)
from phalanx.types import Nested

__all__ = ["Graph", "refuse_transforms"]

_BACKWARD = 1  # what sets the seeds of backward passes apart from those of forward passes


@dataclass
class _Given:
    """One piece of the caller's inputs, leaf by leaf.

    Attributes:
        wanted: Which leaves shall have a gradient.
        versions: Of those that are tensors.
    """

    leaves: list[Any]  # Any: whatever the module takes
    spec: pytree.TreeSpec
    wanted: list[bool]
    versions: list[int]

    @classmethod
    def of(cls, part: Nested, records: bool) -> _Given:
        leaves, spec = flatten(part)
        wanted = [records and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        return cls(leaves, spec, wanted, _versions_of(leaves))

    def cut_off(self) -> tuple[Nested, list[bool]]:
        """Return the inputs without the caller's graph, and which need a gradient."""
        leaves = [each.detach() if isinstance(each, Tensor) else each for each in self.leaves]
        return unflatten(leaves, self.spec), self.wanted


class Graph:
    """The replicas' graphs of one forward pass, and their node in the caller's graph.

    Args:
        executor: Who runs the parts.
        parts: Nested inputs, one piece of the batch each; None for those that are left out.
        run: The module's forward pass.
        owners: The replica that runs each piece; default: whoever is free.
        inputs: See `ForwardTask`.

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
        inputs: Inputs | None,
    ) -> None:
        _refuse_tangents(executor.parameters, parts)
        self._executor = executor
        self._run = run
        self._inputs = inputs
        self._records = torch.is_grad_enabled()
        self.modes = CallerModes.capture(executor.devices)
        self._trainable = {id(p) for p in executor.parameters if p.requires_grad}
        self._num_parts = len(parts)
        self._owners = owners
        self._given = {
            piece: _Given.of(part, self._records)
            for piece, part in enumerate(parts)
            if part is not None
        }
        self._graphs: dict[int, ReplicaGraph] = {}  # of pieces with such outputs, until freed
        # (piece, place) of outputs that need gradients
        self._connected: list[tuple[int, int]] = []
        self._forward_s: list[float] = []
        self._observe: Callable[[Sequence[float]], None] | None = None

    # -- forward -----------------------------------------------------

    def forward(self, weights: Sequence[float]) -> RunResult:
        """Run the module on every part; ``weights`` say what each stands for."""
        batches = [
            self._given[piece].cut_off() if piece in self._given else None
            for piece in range(self._num_parts)
        ]
        task = ForwardTask(self._run, self._records, self._inputs)
        seed = (seed_of_process(),)
        return self._executor.run(task, batches, weights=weights, seed=seed, owners=self._owners)

    def outputs(self, result: RunResult) -> list[Nested]:
        """Return the pieces' outputs, in the caller's graph where they need gradients."""
        self._owners = [max(replica, 0) for replica in result.replica_of]  # who has the graphs
        flat: dict[int, list[Any]] = {}
        specs: dict[int, pytree.TreeSpec] = {}
        for piece in self._given:
            found: Outputs = result.results[piece]
            flat[piece], specs[piece] = flatten(found.nested)
            self._connected += [(piece, place) for place in found.needing]
            if found.graph is not None:
                self._graphs[piece] = found.graph
        if self._connected:
            values = [flat[piece][place] for piece, place in self._connected]
            connected = _Connect.apply(self, values, *self._tensors())  # type: ignore[no-untyped-call]
            for (piece, place), tensor in zip(self._connected, connected, strict=True):
                flat[piece][place] = tensor
        return [unflatten(flat[piece], spec) for piece, spec in specs.items()]

    def report_seconds(
        self, forward_s: Sequence[float], observe: Callable[[Sequence[float]], None]
    ) -> None:
        """Give ``observe`` what each replica takes, once the backward pass through all is done.

        Args:
            forward_s: What each has taken until now; to be called after :meth:`outputs`.
        """
        if self._connected:
            self._forward_s, self._observe = list(forward_s), observe
        else:
            observe(forward_s)

    def _tensors(self) -> list[Tensor]:
        """Return the caller's tensors that need gradients: input leaves first, then parameters."""
        leaves = [
            leaf
            for given in self._given.values()
            for leaf, wanted in zip(given.leaves, given.wanted, strict=True)
            if wanted
        ]
        return leaves + [p for p in self._executor.parameters if id(p) in self._trainable]

    # -- backward ----------------------------------------------------

    def backward(self, grads: Sequence[Tensor | None], keep_graph: bool) -> Gradients:
        """Return the gradients of :meth:`_tensors`; each replica goes back through its graphs."""
        if not self._graphs:
            raise StateError(
                "`backward()` needs the graph of its forward pass, but an earlier `backward()` "
                "has freed it. Call the first one with retain_graph=True."
            )
        self._check_inputs()
        members = self._members(grads)
        result = self._run_backward(grads, members, keep_graph)
        if result.drew:
            advance_process_generator()
        if set(members) == set(self._given):
            self._tell_seconds(result.seconds)
        gradients = self._input_gradients(result) + self._parameter_gradients(result)
        if not keep_graph:
            self._graphs.clear()
        return gradients

    def _run_backward(
        self, grads: Sequence[Tensor | None], members: Sequence[int], keep_graph: bool
    ) -> RunResult:
        executor = self._executor
        own: dict[int, dict[int, Tensor]] = {piece: {} for piece in members}
        for (piece, place), grad in zip(self._connected, grads, strict=True):
            if grad is not None:
                own[piece][place] = grad
        batches = [
            (self._graphs[piece], own[piece]) if piece in own else None
            for piece in range(self._num_parts)
        ]
        task = BackwardTask(keep_graph)
        with torch.enable_grad():  # gradients are asked for
            return executor.run(
                task,
                batches,
                weights=[float(piece in own) for piece in range(self._num_parts)],
                seed=(seed_of_process(), _BACKWARD),
                owners=self._owners,
            )

    def _check_inputs(self) -> None:
        if any(given.versions != _versions_of(given.leaves) for given in self._given.values()):
            raise StateError(
                "An input of a container must stay as it is until `backward()`, but was modified "
                "by an inplace operation after the forward pass. Change a copy, or run backward "
                "first."
            )

    def _members(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Return the pieces whose outputs got a gradient."""
        pairs = zip(self._connected, grads, strict=True)
        return list(dict.fromkeys(piece for (piece, _), grad in pairs if grad is not None))

    def _tell_seconds(self, backward_s: Sequence[float]) -> None:
        observe, self._observe = self._observe, None
        if observe is not None:
            observe([sum(each) for each in zip(self._forward_s, backward_s, strict=True)])

    def _input_gradients(self, result: RunResult) -> Gradients:
        gradients: Gradients = []
        for piece, given in self._given.items():
            leaves = [leaf for leaf, w in zip(given.leaves, given.wanted, strict=True) if w]
            found = result.results[piece] or [None] * len(leaves)
            pairs = zip(leaves, found, strict=True)
            gradients += [None if own is None else own.to(leaf.device) for leaf, own in pairs]
        return gradients

    def _parameter_gradients(self, result: RunResult) -> Gradients:
        """Return the sums for those parameters that autograd asks for."""
        sums = self._executor.add_gradients(result)
        return [
            None if total is None else _shaped(total, parameter)
            for parameter, total in zip(self._executor.parameters, sums, strict=True)
            if id(parameter) in self._trainable
        ]


class _Connect(torch.autograd.Function):
    """Stands in the caller's graph for all replicas' graphs."""

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


def _shaped(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    return gradient.as_strided(parameter.shape, dense_strides(parameter))


# Any: leaves of the user's own inputs.
def _versions_of(leaves: Iterable[Any]) -> list[int]:
    """Return the versions of all tensors; own leaves have another, for slices share one."""
    return [
        leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def refuse_transforms() -> None:
    """Refuse what follows tensors by the thread that it was entered in.

    Raises:
        UnsupportedError: In a transform of `torch.func`.
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
