"""One forward pass over workers as one node of the caller's autograd graph.

    caller     inputs ─┐                                           ┌─ outputs of worker 0
                       │          (one autograd.Function)          ├─ outputs of worker 1
    worker 0   own inputs ── module ── own outputs ── graph kept there
    worker 1   own inputs ── module ── own outputs ── graph kept there

Torch's engine would run all CPU parts of one graph on a single thread. Here every worker's part is
a graph of its own, cut off from the caller's, and backward runs each in its worker again. How
inputs are cut and outputs merged is not known here: that happens outside, in the caller's graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import TreeSpec

from phalanx.errors import StateError, UnsupportedError
from phalanx.execution import Executor, MicrobatchContext, RunResult
from phalanx.plan import flatten, overlaps, part_bounds, unflatten
from phalanx.types import Nested

__all__ = [
    "Connection",
    "Given",
    "Gradients",
    "RunPart",
    "add_shared",
    "freed",
    "refuse_transforms",
    "versions_of",
]

_BLOCK = 64

Gradients = list[Tensor | None]
RunPart = Callable[[int, nn.Module, Nested], Nested]  # (worker, module, inputs) -> outputs


@dataclass
class Given:
    """What the caller gave one worker, leaf by leaf.

    Attributes:
        wanted: Which leaves shall have a gradient.
        versions: Of those that are tensors.
    """

    leaves: list[Any]  # Any: whatever the module takes
    spec: TreeSpec
    wanted: list[bool]
    versions: list[int]


class Connection(ABC):
    """The workers' graphs of one forward pass, and their node in the caller's graph.

    Args:
        executor: Who runs the parts.
        parts: Nested inputs by worker; None for those that take no part.

    Raises:
        UnsupportedError: In forward-mode differentiation.
    """

    def __init__(self, executor: Executor, parts: Sequence[Nested | None]) -> None:
        self._parameters = executor.parameters
        self._num_workers = len(executor)
        _refuse_tangents(executor.parameters, parts)
        self._records = torch.is_grad_enabled()
        self._trainable = {id(p) for p in executor.parameters if p.requires_grad}
        self._given = {
            worker: self._open_part(part) for worker, part in enumerate(parts) if part is not None
        }
        # (worker, place) of outputs that need gradients
        self._connected: list[tuple[int, int]] = []
        self._forward_s: list[float] = []
        self._observe: Callable[[Sequence[float]], None] | None = None

    @abstractmethod
    def batches(self) -> Sequence[Nested]:
        """Return what the executor hands out, by worker."""

    @abstractmethod
    def work(
        self, run: RunPart
    ) -> Callable[[MicrobatchContext], Any]:  # Any: what `outputs` takes in
        """Return the executor's run over the batches; ``run`` is the module's forward pass."""

    @abstractmethod
    def outputs(self, report: RunResult) -> list[Nested]:
        """Return the workers' outputs, in the caller's graph where they need gradients."""

    @abstractmethod
    def backward(self, grads: Sequence[Tensor | None], keep_graph: bool) -> Gradients:
        """Run every worker's backward pass and return the gradients of :meth:`_tensors`."""

    @abstractmethod
    def _forget(self) -> None:
        """Let all graphs go."""

    def report_seconds(
        self, forward_s: Sequence[float], observe: Callable[[Sequence[float]], None]
    ) -> None:
        """Give ``observe`` what each worker takes, once the backward pass through all is done.

        Args:
            forward_s: What each has taken until now; to be called after :meth:`outputs`.
        """
        if self._connected:
            self._forward_s, self._observe = list(forward_s), observe
        else:
            observe(forward_s)

    def _open_part(self, part: Nested) -> Given:
        leaves, spec = flatten(part)
        wanted = [
            self._records and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
        ]
        return Given(leaves, spec, wanted, versions_of(leaves))

    def _connect(
        self, flat: dict[int, list[Any]], specs: dict[int, TreeSpec], places: list[tuple[int, int]]
    ) -> list[Nested]:
        """Return the outputs by worker, those at ``places`` as outputs of this node."""
        self._connected = places
        if places:
            values = [flat[worker][place] for worker, place in places]
            connected = _Connect.apply(self, values, *self._tensors())  # type: ignore[no-untyped-call]
            for (worker, place), tensor in zip(places, connected, strict=True):
                flat[worker][place] = tensor
        else:
            self._forget()
        return [unflatten(flat[worker], spec) for worker, spec in specs.items()]

    def _tensors(self) -> list[Tensor]:
        """Return the caller's tensors that need gradients: input leaves first, then parameters."""
        leaves = [
            leaf
            for given in self._given.values()
            for leaf, wanted in zip(given.leaves, given.wanted, strict=True)
            if wanted
        ]
        return leaves + [p for p in self._parameters if id(p) in self._trainable]

    def _check_inputs(self) -> None:
        if any(given.versions != versions_of(given.leaves) for given in self._given.values()):
            raise StateError(
                "An input of a container must stay as it is until `backward()`, but was modified "
                "by an inplace operation after the forward pass. Change a copy, or run backward "
                "first."
            )

    def _reached(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Return the workers whose outputs got a gradient."""
        reached = (
            worker
            for (worker, _), grad in zip(self._connected, grads, strict=True)
            if grad is not None
        )
        return list(dict.fromkeys(reached))

    def _tell_seconds(self, backward_s: Sequence[float]) -> None:
        observe, self._observe = self._observe, None
        if observe is not None:
            observe([sum(each) for each in zip(self._forward_s, backward_s, strict=True)])


class _Connect(torch.autograd.Function):
    """Stands in the caller's graph for all workers' graphs."""

    # Any: torch's own signature for the context.
    @staticmethod
    def forward(
        ctx: Any, graph: Connection, values: list[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
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
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, None, *ctx.graph.backward(grads, keep_graph))


def freed() -> StateError:
    """Return the error for a second backward pass."""
    return StateError(
        "`backward()` needs the graph of its forward pass, but an earlier `backward()` "
        "has freed it. Call the first one with retain_graph=True."
    )


def add_shared(executor: Executor, left: Gradients, right: Gradients, *, fresh: bool) -> Gradients:
    """Add the last two partial sums, every thread its share of the elements.

    Args:
        fresh: Return memory that nobody else holds; else ``left`` takes ``right``.
    """
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    sums = [torch.empty_like(a) if fresh else a for a, _ in pairs]
    sizes = [a.numel() for a, _ in pairs]
    starts = [stop - size for stop, size in zip(accumulate(sizes), sizes, strict=True)]
    bounds = part_bounds(sum(sizes), len(executor), _BLOCK)

    def add(index: int) -> None:
        for pair, start, stop in overlaps(starts, sizes, *bounds[index]):
            a, b = pairs[pair]
            torch.add(a[start:stop], b[start:stop], out=sums[pair][start:stop])

    if pairs:
        executor.each(add)
    added = iter(sums)

    def total(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is not None and b is not None:
            return next(added)
        one = b if a is None else a
        return one.clone() if fresh and one is not None else one

    return [total(a, b) for a, b in zip(left, right, strict=True)]


# Any: leaves of the user's own inputs.
def versions_of(leaves: Iterable[Any]) -> list[int]:
    """Return the versions of all tensors; own leaves have another, for slices share one."""
    return [
        leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def refuse_transforms() -> None:
    """Refuse what follows tensors by the thread that it was entered in.

    Raises:
        UnsupportedError: In a transform of `torch.func`.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(
            "A container must be called outside of `torch.func`'s transforms (`grad`, `vmap`, "
            "`jvp`, …), but is called in one. Use the unwrapped module there."
        )


def _refuse_tangents(parameters: Sequence[Tensor], parts: Sequence[Nested | None]) -> None:
    if forward_ad._current_level < 0:
        return
    leaves = [leaf for part in parts if part is not None for leaf in flatten(part)[0]]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(parameters)
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedError(
            "A container must be differentiated backward, but got a tensor with a tangent "
            "(forward-mode differentiation). Use the unwrapped module for it."
        )
