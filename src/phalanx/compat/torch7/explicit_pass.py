"""One explicit forward pass, and the passes back through the graph that autograd made of it.

forward(input)                    input leaves, cut off ── module ── outputs      (graph kept)
backward(input, gradOutput)       gradInput ◄──────────── module ◄── gradOutput
                                      parameters' grad += scale × theirs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, StateError
from phalanx.plan import flatten, leaf_paths, unflatten
from phalanx.torch_internals import pytree
from phalanx.types import Nested


class ExplicitPass:
    """A module's last forward pass, and its graph.

    It belongs to one module in this process: a copy of it, deep or pickled, is empty.

    Args:
        wants_grad_input: Whether gradients of inputs are computed.

    Attributes:
        output: What the module returned, as plain values outside of any graph.
        grad_input: What the last pass back found, nested like the input.
    """

    output: Nested
    grad_input: Nested

    def __init__(self, wants_grad_input: bool = True) -> None:
        self.wants_grad_input = wants_grad_input
        self.forget()

    def forget(self) -> None:
        """Forget the pass and its graph."""
        self.forget_graph()
        self.output = torch.empty(0)
        self.grad_input = torch.empty(0)

    def forget_graph(self) -> None:
        """Free what only passes back need; ``output`` and ``grad_input`` stay."""
        self._inputs: list[Any] = []  # Any: leaves of the user's own inputs
        self._outputs: list[Any] = []
        self._paths: list[str] = []
        self._inputs_spec: pytree.TreeSpec | None = None

    def forward(self, run: Callable[[Nested], Nested], given: Nested) -> Nested:
        """Return ``run(given)``, and keep its graph; none is made under `torch.no_grad()`."""
        self.forget_graph()  # before there is a second one
        leaves, spec = flatten(given)
        inputs = [_own_leaf(leaf, self.wants_grad_input) for leaf in leaves]
        made = run(unflatten(inputs, spec))
        outputs, outputs_spec = flatten(made)
        self.output = unflatten(
            [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs], outputs_spec
        )
        if torch.is_grad_enabled():
            self._inputs, self._inputs_spec = inputs, spec
            self._outputs, self._paths = outputs, leaf_paths(made)
        return self.output

    def input_gradients(self, given: Nested, grad_output: Nested) -> Nested:
        """Compute the gradients of the inputs, and touch no parameter's."""
        return self._keep(self._gradients(given, grad_output, self._wanted()))

    def parameter_gradients(
        self, given: Nested, grad_output: Nested, parameters: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        """Return the gradients of ``parameters``, without adding them anywhere."""
        return self._gradients(given, grad_output, parameters)

    def accumulate(
        self,
        given: Nested,
        grad_output: Nested,
        parameters: Sequence[nn.Parameter],
        scale: float = 1.0,
    ) -> None:
        """Add ``scale`` times the parameters' gradients to their ``grad``."""
        outputs, grads = self._ends(given, grad_output)
        if scale != 1:
            grads = [grad * scale for grad in grads]
        _backward(outputs, grads, parameters)

    def backward(
        self, given: Nested, grad_output: Nested, parameters: Sequence[nn.Parameter]
    ) -> Nested:
        """Do both at once, in one pass over the graph."""
        outputs, grads = self._ends(given, grad_output)
        wanted = self._wanted()
        try:
            _backward(outputs, grads, [*wanted, *parameters])
            found = [leaf.grad for leaf in wanted]
        finally:
            for leaf in wanted:
                leaf.grad = None
        return self._keep(found)

    def __reduce__(self) -> tuple[type[ExplicitPass], tuple[bool]]:
        return type(self), (self.wants_grad_input,)

    def _gradients(
        self, given: Nested, grad_output: Nested, wanted: Sequence[Tensor]
    ) -> list[Tensor | None]:
        outputs, grads = self._ends(given, grad_output)
        if not outputs or not wanted:
            return [None] * len(wanted)
        return list(
            torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
        )

    def _wanted(self) -> list[Tensor]:
        return [leaf for leaf in self._inputs if isinstance(leaf, Tensor) and leaf.requires_grad]

    def _keep(self, found: Sequence[Tensor | None]) -> Nested:
        """Nest gradients like the input: zeros where nothing arrived, None where none can."""
        if not self.wants_grad_input or self._inputs_spec is None:
            return None
        arrived = iter(found)
        leaves = []
        for leaf in self._inputs:
            gradient = None
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                gradient = next(arrived)
                gradient = torch.zeros_like(leaf) if gradient is None else gradient
            leaves.append(gradient)
        self.grad_input = unflatten(
            [None if leaf is None else leaf.detach() for leaf in leaves], self._inputs_spec
        )
        return self.grad_input

    def _ends(self, given: Nested, grad_output: Nested) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs where a pass back begins, and the gradients it begins with.

        Raises:
            StateError: There was no forward pass, or one of another input.
            ConfigError: ``grad_output`` is not nested like the output.
        """
        if self._inputs_spec is None:
            raise StateError(
                "A pass back needs the graph of a forward pass, but there is none. Call "
                "`forward(input)` first, outside of `torch.no_grad()`; `updateParameters()` and "
                "`clearState()` end a pass."
            )
        if not same_leaves(given, unflatten(self._inputs, self._inputs_spec)):
            raise StateError(
                "`input` must be that of the last forward pass, but is another. Call "
                "`forward(input)` with it first."
            )
        leaves, _ = flatten(grad_output)
        given_at = dict(zip(leaf_paths(grad_output), leaves, strict=True))
        if set(given_at) != set(self._paths):
            raise ConfigError(
                f"`gradOutput` must be nested like the output, whose leaves are {self._paths}, but "
                f"its leaves are {list(given_at)}."
            )
        ends = [
            (output, given_at[path].detach().to(output))
            for output, path in zip(self._outputs, self._paths, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and given_at[path] is not None
        ]
        return [output for output, _ in ends], [gradient for _, gradient in ends]


def same_leaves(left: Nested, right: Nested) -> bool:
    """Tell whether two nested values are the same, by memory or, failing that, by values."""
    leaves, spec = flatten(left)
    others, others_spec = flatten(right)
    return spec == others_spec and all(map(_same, leaves, others))


def _backward(outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if outputs and inputs:
        torch.autograd.backward(outputs, grads, retain_graph=True, inputs=inputs)


# Any: a leaf of the user's own inputs.
def _own_leaf(leaf: Any, wanted: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    own = leaf.detach()
    can = own.is_floating_point() or own.is_complex()
    return own.requires_grad_() if wanted and can and torch.is_grad_enabled() else own


# Any: a leaf of the user's own inputs.
def _same(leaf: Any, own: Any) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(own, Tensor):
        return leaf is own or bool(leaf == own)
    if (leaf.shape, leaf.dtype, leaf.device) != (own.shape, own.dtype, own.device):
        return False
    if leaf.data_ptr() == own.data_ptr() and leaf.stride() == own.stride():
        return True
    return torch.equal(leaf, own)
