"""The connection of a pass over threads of this process, whose graphs are kept here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from phalanx.codecs import Feedback
from phalanx.errors import StateError
from phalanx.execution import (
    MicrobatchContext,
    PartialSum,
    PartialSums,
    RunResult,
    ThreadExecutor,
    blame,
)
from phalanx.memory import dense_strides
from phalanx.parallel.connection import Connection, Gradients, RunPart, add_shared, freed
from phalanx.plan import flatten, unflatten
from phalanx.replicas import (
    CallerModes,
    Inputs,
    add_gradients,
    advance_process_generator,
    apart,
    derive_seed,
    placed,
    run_backward,
    seed_of_process,
)
from phalanx.types import Nested

__all__ = ["ExecutorGraph", "HeldGradients"]

_BACKWARD = 1  # what sets the seeds of backward passes apart from those of forward passes
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


class HeldGradients:
    """What workers have kept of backward passes that were not merged, by worker."""

    def __init__(self) -> None:
        self.by_worker: dict[int, Gradients] = {}
        self._parameters: list[nn.Parameter] = []

    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        """Say whose gradients are kept from now on.

        Raises:
            StateError: Gradients of other parameters are kept.
        """
        if self.by_worker and list(map(id, parameters)) != list(map(id, self._parameters)):
            raise StateError(
                "A container must keep its parameters between `no_sync()` and the backward pass "
                "that merges, but they were replaced. Merge first, or call `zero_grad()`."
            )
        self._parameters = list(parameters)

    def add(self, worker: int, gradients: Gradients) -> None:
        """Add to what ``worker`` keeps."""
        held = self.by_worker.get(worker)
        self.by_worker[worker] = gradients if held is None else add_gradients(held, gradients)

    def merge(self) -> None:
        """Add everything to the parameters' own gradients, in the order of the workers."""
        for _, gradients in sorted(self.by_worker.items()):
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    _add_to_grad(parameter, gradient)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.by_worker.clear()


@dataclass
class _Part:
    """One worker's own graph: its own inputs, and what the module made of them."""

    inputs: list[Any] = field(default_factory=list)  # Any: whatever the module takes and returns
    turn: MicrobatchContext | None = None
    outputs: list[Any] | None = None
    outputs_spec: TreeSpec | None = None


class ExecutorGraph(Connection):
    """A connection whose graphs lie with the threads of an executor.

    Args:
        executor: Who runs the parts.
        parts: Nested inputs by worker; None for those that take no part.
        held: Gradients kept by workers; they are added to those that are merged next.
        hold: Keep this pass's gradients there, instead of merging them.
        feedback: Every worker's gradient passes through its codec before it is added.
        inputs: Gives workers copies of inputs that the module writes to; None lets it write to the
            caller's, as plain PyTorch does.

    Raises:
        UnsupportedError: In forward-mode differentiation.
    """

    def __init__(
        self,
        executor: ThreadExecutor,
        parts: Sequence[Nested | None],
        *,
        held: HeldGradients,
        hold: bool = False,
        feedback: Feedback | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        super().__init__(executor, parts)
        self._inputs = inputs
        self._executor = executor
        self._batches = parts
        self._held = held
        self._hold = hold
        self._feedback = feedback
        self._parts = {worker: _Part() for worker in self._given}

    def batches(self) -> Sequence[Nested]:
        """Return the parts; a worker's own inputs are made in its thread."""
        return self._batches

    def work(self, run: RunPart) -> Callable[[MicrobatchContext], None]:
        """Return what runs the module and keeps its graph here."""

        def work(turn: MicrobatchContext) -> None:
            trains = turn.replica.module.training
            copies = self._inputs is not None and self._inputs.copies(trains)
            inputs = self._inputs_of(turn, copies)
            watched: AbstractContextManager[None] = nullcontext()
            if self._inputs is not None:
                own = [e for e in self._parts[turn.index].inputs if isinstance(e, Tensor)]
                watched = self._inputs.watched(own, copies, trains=trains)
            with watched, turn.drawing():
                outputs = run(turn.index, turn.replica.module, inputs)
            self._keep_outputs(turn, outputs)

        return work

    def _inputs_of(self, turn: MicrobatchContext, copies: bool) -> Nested:
        """Return the worker's inputs: on its device, cut off from the caller's graph."""
        part, given = self._parts[turn.index], self._given[turn.index]
        part.turn = turn
        part.inputs = [
            _own_leaf(leaf, turn.replica.device, wanted, copies)
            for leaf, wanted in zip(given.leaves, given.wanted, strict=True)
        ]
        return unflatten(part.inputs, given.spec)

    def _keep_outputs(self, turn: MicrobatchContext, outputs: Nested) -> None:
        part = self._parts[turn.index]
        part.outputs, part.outputs_spec = flatten(outputs)

    def outputs(self, report: RunResult) -> list[Nested]:  # noqa: ARG002
        """Return the workers' outputs, which have come by themselves."""
        places = [
            (worker, place)
            for worker, part in self._parts.items()
            for place, leaf in enumerate(part.outputs or ())
            if self._records and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        specs = {
            worker: part.outputs_spec
            for worker, part in self._parts.items()
            if part.outputs_spec is not None
        }
        flat = {worker: _detached(part) for worker, part in self._parts.items()}
        return self._connect(flat, specs, places)

    def backward(self, grads: Sequence[Tensor | None], keep_graph: bool) -> Gradients:
        """Run every worker's backward pass and return the gradients of :meth:`_tensors`."""
        if not self._parts or any(part.outputs is None for part in self._parts.values()):
            raise freed()
        self._check_inputs()
        sums = PartialSums(len(self._executor))
        modes = CallerModes.capture(self._executor.devices)
        members = self._members(grads)
        whole = self._reaches_all_parameters()
        hold, settle = self._hold and whole, whole and not self._hold
        seconds = [0.0] * len(self._executor)
        seed = seed_of_process()
        turns = [part.turn for part in self._parts.values() if part.turn is not None]
        for turn in turns:
            turn.rng_use.drew.clear()

        def work(worker: int) -> Gradients | None:
            with modes.entered(self._executor.devices[worker]), self._executor.attending(worker):
                watch = self._executor.stopwatch(worker)
                own = None
                if worker in members:
                    own = self._backward_of(worker, grads, keep_graph, seed)
                seconds[worker] = watch.lap()
                if settle:
                    own = self._with_held(worker, own)
                if not hold:
                    sums.put(worker, None if own is None else PartialSum(own, {}))
                return own

        try:
            with self._executor.open_meeting(members):
                results = self._executor.each(work)
        except BaseException:
            if self._feedback is not None:
                self._feedback.rollback()
            raise
        if any(turn.rng_use.drew.is_set() for turn in turns):
            advance_process_generator()
        if hold:
            self._keep(results)
        if settle:
            self._held.clear()
            if self._feedback is not None:
                self._feedback.commit()
        if set(members) == set(self._parts):
            self._tell_seconds(seconds)
        parameter_gradients = self._merged([] if hold else sums.operands(), settle)
        gradients = self._input_gradients() + parameter_gradients
        if not keep_graph:
            self._forget()
        return gradients

    def _reaches_all_parameters(self) -> bool:
        """Tell whether the pass is one for all parameters, not `autograd.grad` for some tensors.

        Only such a pass keeps or takes over what workers hold, and what a codec did not send.
        """
        if not (self._hold or self._held.by_worker or self._feedback):
            return True
        return all(_is_reached(p) for p in self._executor.parameters if id(p) in self._trainable)

    def _forget(self) -> None:
        for part in self._parts.values():
            part.inputs, part.outputs, part.turn = [], None, None

    def _members(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Return the workers whose outputs got a gradient; all, where they need each other."""
        if self._executor.meets:
            return list(self._parts)
        return self._reached(grads)

    def _backward_of(
        self, worker: int, grads: Sequence[Tensor | None], keep_graph: bool, seed: int
    ) -> Gradients:
        part = self._parts[worker]
        assert part.turn is not None
        replica = self._executor.replicas[worker]
        pairs = []
        for (owner, place), grad in zip(self._connected, grads, strict=True):
            if owner == worker and part.outputs is not None:
                output = part.outputs[place]
                if grad is not None:
                    pairs.append((output, grad.to(output.device)))
                elif self._executor.meets:  # the others wait for this worker in their batch norms
                    pairs.append((output, torch.zeros_like(output)))
        try:
            if pairs:
                outputs, output_grads = zip(*pairs, strict=True)
                once = self._executor.compile_once.running("backward", replica.device, output_grads)
                seeded = derive_seed(seed, _BACKWARD, worker)
                with once, replica.going_back(), part.turn.drawing(seeded):
                    run_backward(outputs, output_grads, keep_graph=keep_graph)
            return replica.take_gradients()
        except BaseException as error:
            replica.drop_gradients()
            blame(error, replica, worker)
            raise

    def _with_held(self, worker: int, own: Gradients | None) -> Gradients | None:
        held = self._held.by_worker.get(worker)
        if held is not None:  # added to the new ones, so that a failure elsewhere leaves it whole
            copies = [None if each is None else each.clone() for each in held]
            own = add_gradients(own, held) if own is not None else copies
        if own is None or self._feedback is None:
            return own
        shapes = [parameter.shape for parameter in self._executor.parameters]
        places = self._feedback.places_of(self._executor.parameters)
        return self._feedback.compress(worker, own, shapes, places)

    def _keep(self, results: Sequence[Gradients | None]) -> None:
        def add(worker: int) -> None:
            gradients = results[worker]
            if gradients is not None:
                self._held.add(worker, gradients)

        self._executor.each(add)

    def _input_gradients(self) -> Gradients:
        gradients: Gradients = []
        for worker, part in self._parts.items():
            given = self._given[worker]
            for leaf, own, wanted in zip(given.leaves, part.inputs, given.wanted, strict=True):
                if wanted:
                    gradient, own.grad = own.grad, None
                    gradients.append(None if gradient is None else gradient.to(leaf.device))
        return gradients

    def _merged(self, operands: Sequence[PartialSum], settle: bool) -> Gradients:
        """Add the last two partial sums, every thread its share of the elements.

        What workers kept of a parameter that was frozen since goes to its `grad` at once: autograd
        asks for the others only.
        """
        if not operands:
            return [None] * len(self._trainable)
        sums, *others = [apart(operand.gradients) for operand in operands]  # or `grad` would share
        if others:
            sums = add_shared(self._executor, sums, *others, fresh=False)
        for parameter, total in zip(self._executor.parameters, sums, strict=True):
            if settle and total is not None and id(parameter) not in self._trainable:
                _add_to_grad(parameter, total)
        return [
            None if total is None else total.as_strided(parameter.shape, dense_strides(parameter))
            for total, parameter in zip(sums, self._executor.parameters, strict=True)
            if id(parameter) in self._trainable
        ]


def _add_to_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    shaped = gradient.as_strided(parameter.shape, dense_strides(parameter))
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad += shaped


def _is_reached(parameter: Tensor) -> bool:
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what torch answers when `autograd.grad` was asked for this very leaf
        return True


# Any: a leaf of the user's own inputs.
def _own_leaf(leaf: Any, device: torch.device, wanted: bool, copies: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    own = placed(leaf, device, copies)
    return own.requires_grad_() if wanted else own


def _detached(part: _Part) -> list[Any]:
    """Return the outputs without their graph, and in memory of their own.

    A module may return its input, or a view of it; that memory is the caller's.
    """
    inputs = (leaf for leaf in part.inputs if isinstance(leaf, Tensor))
    given = {address for leaf in inputs for address in _addresses(leaf)}

    def detached(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach()
        return own.clone() if given.intersection(_addresses(own)) else own

    return [detached(leaf) for leaf in part.outputs or ()]


def _addresses(tensor: Tensor) -> list[int]:
    """Return where the memory of a tensor begins: a sparse or nested one has several pieces."""
    pieces = [tensor]
    if tensor.layout is torch.sparse_coo:
        pieces = [tensor._indices(), tensor._values()]
    elif tensor.layout in _BY_ROW:
        pieces = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in _BY_COLUMN:
        pieces = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout is torch.jagged:
        pieces = [tensor.values()]
    return [piece.untyped_storage().data_ptr() for piece in pieces]
