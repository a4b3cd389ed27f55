"""The connection of a pass over worker processes, which keep its graphs.

    forward     inputs ──────────────►  module; the graph stays there under a number
                outputs ◄────────────
    backward    output gradients ────►  backward through the graph of that number
                input gradients ◄────   (gradients of parameters: in slots, as in every run)

Either is one run of the executor, in which a worker that is lost is replaced. Who has not got the
graph
is sent the inputs once more with the output gradients, and repeats the forward pass first: with the
same random numbers, buffers and modes, and so to the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from phalanx.errors import StateError
from phalanx.execution import (
    CachedPayload,
    Changes,
    MicrobatchContext,
    PartialSum,
    ProcessExecutor,
    RunResult,
)
from phalanx.memory import dense_strides
from phalanx.parallel.connection import (
    Connection,
    Given,
    Gradients,
    RunPart,
    add_shared,
    freed,
    versions_of,
)
from phalanx.plan import flatten, unflatten
from phalanx.replicas import (
    CallerModes,
    advance_process_generator,
    derive_seed,
    run_backward,
    seed_of_process,
)
from phalanx.types import Nested

__all__ = ["RemoteGraph"]

_numbers = itertools.count()
_BACKWARD = 1  # what sets the seeds of backward passes apart from those of forward passes
_PREFIX = "graph"
_CPU = torch.device("cpu")


class RemoteGraph(Connection):
    """A connection whose graphs lie in worker processes.

    Args:
        executor: Who runs the parts.
        parts: Nested inputs by worker; None for those that take no part.
        seed: Where the random numbers of the pass start.
        alive: Returns the numbers of all passes that may still be gone back through; workers forget
            the others.

    Attributes:
        number: The pass's own.
    """

    def __init__(
        self,
        executor: ProcessExecutor,
        parts: Sequence[Nested | None],
        seed: tuple[int, ...],
        alive: Callable[[], frozenset[int]],
    ) -> None:
        super().__init__(executor, parts)
        self.number = next(_numbers)
        self._executor: ProcessExecutor | None = executor
        self._seed = seed
        self._alive = alive
        self._modes = CallerModes.capture(executor.devices)
        self._versions = versions_of(executor.parameters)
        self._run: RunPart | None = None
        self._moment: Changes | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the pass may still be gone back through."""
        return self._moment is not None

    def batches(self) -> Sequence[Nested]:
        """Return each worker's inputs."""
        alive = self._alive() | {self.number}
        return [
            _Inputs(self._name(worker), _Leaves.of(self._given[worker]), alive)
            if worker in self._given
            else None
            for worker in range(self._num_workers)
        ]

    def work(self, run: RunPart) -> Callable[[MicrobatchContext], _Found]:
        """Return what runs the module, and keeps its graph there."""
        self._run = run
        return _Forward(run, f"{_PREFIX} {self.number}" if self._records else None)

    def outputs(self, report: RunResult) -> list[Nested]:
        """Return what has come back."""
        assert self._executor is not None
        self._moment = self._executor.moment
        flat: dict[int, list[Any]] = {}
        specs: dict[int, TreeSpec] = {}
        places = []
        for worker in self._given:
            found: _Found = report.results[worker]
            flat[worker], specs[worker] = flatten(found.outputs)
            places += [(worker, place) for place in found.needing]
        return self._connect(flat, specs, places)

    def backward(self, grads: Sequence[Tensor | None], keep_graph: bool) -> Gradients:
        """Run every worker's backward pass and return the gradients of :meth:`_tensors`."""
        executor, run, moment = self._executor, self._run, self._moment
        if executor is None:
            raise StateError(
                "`backward()` needs the worker processes of its forward pass, but they were "
                "dismissed. Call `forward()` again."
            )
        if run is None or moment is None:
            raise freed()
        self._check_inputs()
        self._check_parameters()
        members = self._reached(grads)
        own: dict[int, list[tuple[int, Tensor]]] = {worker: [] for worker in members}
        for (worker, place), grad in zip(self._connected, grads, strict=True):
            if grad is not None:
                own[worker].append((place, grad))
        batches = [
            _Gradients(self._name(worker), self, worker, keep_graph, own[worker])
            if worker in own
            else None
            for worker in range(self._num_workers)
        ]
        task = _Backward(
            run,
            f"{_PREFIX} {self.number}",
            self._modes,
            keep_graph=keep_graph,
            seed=seed_of_process(),
        )
        weights = [float(worker in own) for worker in range(self._num_workers)]
        with executor.as_of(moment), torch.enable_grad():  # gradients are asked for
            report = executor.run(batches, task, weights=weights, seed=self._seed, pinned=True)
        if report.drew:
            advance_process_generator()
        if set(members) == set(self._given):
            self._tell_seconds(report.seconds)
        gradients = self._input_gradients(report) + self._merged(executor, report.operands)
        if not keep_graph:
            self._forget()
        return gradients

    def inputs_again(self, worker: int) -> _Leaves:
        """Return a worker's inputs for whoever has to repeat its forward pass.

        Raises:
            StateError: The module cannot be what it was any more.
        """
        assert self._moment is not None
        assert self._executor is not None
        if not self._executor.knows(self._moment):
            raise StateError(
                "`backward()` needs the worker that ran the forward pass, or the module as it was "
                "then, but the worker was lost and another forward pass was begun since. Call "
                "`forward()` again."
            )
        return _Leaves.of(self._given[worker])

    def dismiss(self) -> None:
        """Let the workers go, and the graph with them."""
        self._executor = None
        self._forget()

    def _check_parameters(self) -> None:
        if self._versions != versions_of(self._parameters):
            raise StateError(
                "Parameters must stay as they are from the forward pass until `backward()`, but "
                "were modified. Call `forward()` again."
            )

    def _forget(self) -> None:
        self._run = self._moment = None

    def _name(self, worker: int) -> str:
        return f"{_PREFIX} {self.number} {worker}"

    def _input_gradients(self, report: RunResult) -> Gradients:
        gradients: Gradients = []
        for worker, given in self._given.items():
            found = report.results[worker]
            gradients += [None] * sum(given.wanted) if found is None else found
        return gradients

    def _merged(self, executor: ProcessExecutor, operands: Sequence[PartialSum]) -> Gradients:
        """Add the last two partial sums; the slots that they lie in are others' afterwards."""
        if not operands:
            return [None] * len(self._trainable)
        left = operands[0].gradients
        right: Gradients = [None] * len(left)
        if len(operands) == 2:
            right = operands[1].gradients
        return [
            None if total is None else total.as_strided(each.shape, dense_strides(each))
            for total, each in zip(
                add_shared(executor, left, right, fresh=True), self._parameters, strict=True
            )
            if id(each) in self._trainable
        ]


@dataclass(frozen=True)
class _Leaves:
    """One worker's inputs, cut off from the caller's graph."""

    nested: Nested
    wanted: list[bool]

    @classmethod
    def of(cls, given: Given) -> _Leaves:
        leaves = [each.detach() if isinstance(each, Tensor) else each for each in given.leaves]
        return cls(unflatten(leaves, given.spec), given.wanted)

    def evaluate(self, run: RunPart, turn: MicrobatchContext) -> _Graph:
        """Run the module, in the worker."""
        leaves, _ = flatten(self.nested)
        wanted = [leaf.requires_grad_() for leaf, w in zip(leaves, self.wanted, strict=True) if w]
        with turn.drawing():
            outputs = run(turn.index, turn.replica.module, self.nested)
        return _Graph(wanted, *flatten(outputs))


@dataclass(frozen=True)
class _Graph:
    """What a worker keeps: inputs that shall have gradients, and outputs."""

    wanted: list[Tensor]
    leaves: list[Any]  # Any: whatever the module returns
    spec: TreeSpec


@dataclass(frozen=True)
class _Found:
    """What comes back of a forward pass: outputs, and the places of those that need gradients."""

    outputs: Nested
    needing: tuple[int, ...]


@dataclass(frozen=True)
class _Inputs(CachedPayload):
    """The inputs of a forward pass."""

    name: str
    leaves: _Leaves
    alive: frozenset[int]

    def for_worker(self, kept: dict[str, int]) -> tuple[_Leaves, frozenset[int]]:
        """Return all, and note that the worker will have the graph; a lost one takes it along."""
        _forget_others(kept, self.alive)
        kept[self.name] = 1
        return self.leaves, self.alive


@dataclass(frozen=True)
class _Gradients(CachedPayload):
    """The output gradients of a backward pass, with their places."""

    name: str
    graph: RemoteGraph
    worker: int
    keep_graph: bool
    pairs: list[tuple[int, Tensor]]

    def for_worker(self, kept: dict[str, int]) -> tuple[list[tuple[int, Tensor]], _Leaves | None]:
        """Return them, and the inputs for a worker that has not got the graph."""
        has = self.name in kept
        if self.keep_graph:
            kept[self.name] = 1
        elif has:
            del kept[self.name]
        return self.pairs, None if has else self.graph.inputs_again(self.worker)


@dataclass(frozen=True)
class _Forward:
    """The run of a forward pass; ``name`` is None where nothing is to be gone back through."""

    run: RunPart
    name: str | None

    def __call__(self, turn: MicrobatchContext) -> _Found:
        inputs, alive = turn.batch
        _forget_others(turn.kept, alive)
        graph = inputs.evaluate(self.run, turn)
        needing = tuple(
            place
            for place, leaf in enumerate(graph.leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        )
        if self.name is not None and needing:
            turn.kept[f"{self.name} {turn.index}"] = graph
        detached = [e.detach() if isinstance(e, Tensor) else e for e in graph.leaves]
        return _Found(unflatten(detached, graph.spec), needing if self.name is not None else ())


@dataclass(frozen=True)
class _Backward:
    """The run of a backward pass.

    Attributes:
        modes: Those of the forward pass.
        seed: Where the random numbers of this pass start; the turn's is the forward pass's.
    """

    run: RunPart
    name: str
    modes: CallerModes
    keep_graph: bool
    seed: int

    def __call__(self, turn: MicrobatchContext) -> Gradients:
        pairs, inputs = turn.batch
        name = f"{self.name} {turn.index}"
        graph: _Graph
        if inputs is None:
            graph = turn.kept.pop(name)
        else:
            with torch.autocast("cpu", enabled=False), self.modes.entered(_CPU):
                graph = inputs.evaluate(self.run, turn)
        if self.keep_graph:
            turn.kept[name] = graph
        turn.rng_use.drew.clear()  # a forward pass that was repeated has been told of before
        with turn.drawing(derive_seed(self.seed, _BACKWARD, turn.index)):
            run_backward(
                [graph.leaves[place] for place, _ in pairs],
                [grad for _, grad in pairs],
                keep_graph=self.keep_graph,
            )
        gradients = [leaf.grad for leaf in graph.wanted]
        for leaf in graph.wanted:
            leaf.grad = None
        return gradients


def _forget_others(kept: dict[str, Any], alive: frozenset[int]) -> None:
    """Forget the graphs of all passes but those; here and in a worker, by the same names."""
    for name in list(kept):
        if name.startswith(_PREFIX) and int(name.split()[1]) not in alive:
            del kept[name]
