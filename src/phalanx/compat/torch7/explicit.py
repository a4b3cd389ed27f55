"""Torch7's calls for ordinary modules and losses of PyTorch.

forward(input)                    input leaves, cut off ── module ── outputs      (graph kept)
backward(input, gradOutput)       gradInput ◄──────────── module ◄── gradOutput
                                      parameters' grad += scale × theirs
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.compat.torch7.flat import flat_parameters
from phalanx.errors import ConfigError, StateError
from phalanx.plan import check_argument, flatten, unflatten
from phalanx.types import Nested


class Explicit:
    """Give an ordinary module Torch7's explicit passes; it is trained in place.

    `forward(input)` cuts its input off from any graph, keeps the graph of the module, and returns
    plain values; the passes back go through that graph, as often as asked, until the next
    `forward`, `updateParameters` or `clearState`. ``net(input)`` calls the module as PyTorch does,
    in the caller's graph. All that is not here (`parameters()`, `train()`, `state_dict()`) is the
    module's own.

    Args:
        module: The module.

    Attributes:
        module: The module, to be a part of others.
        output: The output of the last explicit forward pass.
        gradInput: The gradient of the input from the last pass back. Set to None, gradients of
            inputs are not computed from the next forward pass on (Torch7's speed-up for the
            outermost module); set to anything else, they are again.

    Raises:
        ConfigError: It is none.

    Example:
        >>> net = Explicit(nn.Linear(3, 1))
        >>> criterion = Criterion(nn.MSELoss())
        >>> x, y = torch.ones(2, 3), torch.zeros(2, 1)
        >>> before = criterion.forward(net.forward(x), y)
        >>> net.zeroGradParameters()
        >>> gradInput = net.backward(x, criterion.backward(net.output, y))
        >>> net.updateParameters(0.1)
        >>> gradInput.shape, bool(criterion.forward(net.forward(x), y) < before)
        (torch.Size([2, 3]), True)

    Source: torch/nn's ``Module``.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        self.module = inner_module(module)
        self._graph: _Graph | None = None
        self.output: Nested = torch.empty(0)
        self.gradInput: Nested = torch.empty(0)

    # Any, here and below: whatever the module has, takes and returns.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in vars(self):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_graph": None}

    def close(self) -> None:
        """Dismiss the threads of a container; the next forward pass makes new ones."""
        if hasattr(type(self.module), "close"):
            self.module.close()  # type: ignore[operator]

    # -- passes ------------------------------------------------------

    def forward(self, input: Nested) -> Nested:
        """Run the module on one input, tensor or nested, and return its output as plain values."""
        self._graph = None  # before there is a second one
        self._graph = _Graph(self.module, input, self.gradInput is not None)
        self.output = self._graph.output
        return self.output

    def updateOutput(self, input: Nested) -> Nested:
        """Do what `forward` does."""
        return self.forward(input)

    def updateGradInput(self, input: Nested, gradOutput: Nested) -> Nested:
        """Return the gradient of the input, nested like it, and leave parameters alone.

        Leaves that cannot have a gradient (integers) have None.

        Raises:
            StateError: ``input`` is not that of the last forward pass.
            ConfigError: ``gradOutput`` is not nested like the output.
        """
        found, _ = _checked(self._graph).gradients(input, gradOutput)
        return self._keep(found)

    def accGradParameters(self, input: Nested, gradOutput: Nested, scale: float = 1.0) -> None:
        """Add ``scale`` times the parameters' gradients to their ``grad``."""
        graph, parameters = _checked(self._graph), self._trainable()
        _, found = graph.gradients(input, gradOutput, parameters, of_inputs=False)
        _accumulate(parameters, found, scale)

    def backward(self, input: Nested, gradOutput: Nested, scale: float = 1.0) -> Nested:
        """Do both, in one pass over the graph, and return the gradient of the input."""
        graph, parameters = _checked(self._graph), self._trainable()
        of_inputs, found = graph.gradients(input, gradOutput, parameters)
        _accumulate(parameters, found, scale)
        return self._keep(of_inputs)

    def accUpdateGradParameters(self, input: Nested, gradOutput: Nested, lr: float) -> None:
        """Subtract ``lr`` times the parameters' gradients from them, and leave ``grad`` alone."""
        graph, parameters = _checked(self._graph), self._trainable()
        _, found = graph.gradients(input, gradOutput, parameters, of_inputs=False)
        self._step(parameters, found, lr)

    def clearState(self) -> Self:
        """Forget outputs, gradients of inputs and graphs."""
        self._graph, self.output = None, torch.empty(0)
        self.gradInput = None if self.gradInput is None else torch.empty(0)
        return self

    # -- parameters --------------------------------------------------

    def zeroGradParameters(self) -> None:
        """Zero all gradients in their memory; parameters that have none get zeros."""
        for parameter in self._trainable():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.detach().zero_()

    def updateParameters(self, lr: float) -> None:
        """Subtract ``lr`` times their gradients from the parameters, in place."""
        parameters = self._trainable()
        self._step(parameters, [each.grad for each in parameters], lr)

    def getParameters(self) -> tuple[Tensor, Tensor]:
        """Return all parameters as one tensor, and all gradients as another, of the same size.

        Every parameter and its ``grad`` is a view of them from now on, until ``grad`` is set to
        None, as torch's optimizers do unless ``zero_grad(set_to_none=False)`` is asked. Of a part
        of a model that is flat already these are views of the model's own.

        Raises:
            UnsupportedError: Parameters differ in dtype or device.
        """
        return flat_parameters(self.module)

    def evaluate(self) -> Self:
        """Switch training mode off, in all modules inside too."""
        self.module.eval()
        return self

    def clone(self, *names: str) -> Self:
        """Return a deep copy; with ``names``, it shares its parameters of these names with this."""
        made = copy.deepcopy(self)
        return made.share(self, *names) if names else made

    def share(self, other: nn.Module | Explicit, *names: str) -> Self:
        """Make parameters of this module the very parameters of ``other``, of the same names.

        Args:
            names: Such as ``"weight"`` and ``"bias"``, all by default. Gradients belong to their
                parameters, so ``"gradWeight"`` and the like follow and may be left out.

        Raises:
            ConfigError: A parameter is in ``other`` only, or in another shape, or ``names`` name
                none. Nothing has changed then.
        """
        theirs = {
            name: parameter
            for name, parameter in other.named_parameters(remove_duplicate=False)
            if not names or name.rpartition(".")[2] in names
        }
        if names and not theirs:
            raise ConfigError(
                f"`names` must hold names of parameters of `other`, but holds {names!r}. Gradients "
                "follow their parameters: give 'weight' or 'bias'."
            )
        own = dict(self.module.named_parameters(remove_duplicate=False))
        for name, parameter in theirs.items():
            if name not in own or own[name].shape != parameter.shape:
                raise ConfigError(
                    f"`other` must have parameters of the names and shapes of this module, but has "
                    f"`{name}` of shape {tuple(parameter.shape)}."
                )
        for name, parameter in theirs.items():
            path, _, key = name.rpartition(".")
            # Not `register_parameter()`: recurrent layers keep a second list of their weights.
            setattr(self.module.get_submodule(path), key, parameter)
        return self

    def reset(self, stdv: float | None = None) -> Self:
        """Let every module inside draw its parameters again by its ``reset_parameters()``.

        Args:
            stdv: Draw all parameters of layers with weights of two dims or more uniformly around 0
                with this standard deviation; default: as each layer does by itself.
        """
        for module in reversed(list(self.module.modules())):  # outer ones have the last word
            kind: Any = type(module)
            # Attention layers have a private one. Of the class: wrappers show their module's.
            redraw = getattr(kind, "reset_parameters", getattr(kind, "_reset_parameters", None))
            if redraw is not None:
                redraw(module)
            own = list(module.parameters(recurse=False))
            if stdv is not None and any(parameter.dim() >= 2 for parameter in own):
                for parameter in own:
                    nn.init.uniform_(parameter, -stdv * math.sqrt(3), stdv * math.sqrt(3))
        return self

    # -- inside ------------------------------------------------------

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _keep(self, found: Nested) -> Nested:
        if self.gradInput is not None:
            self.gradInput = found
        return found

    @torch.no_grad()
    def _step(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], lr: float
    ) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.add_(gradient, alpha=-lr)
        self._graph = None  # it was of the old values


class Criterion:
    """Give an ordinary loss Torch7's two calls.

    Args:
        loss_fn: Called as ``loss_fn(input, target)``; returns a scalar.

    Attributes:
        output: The last loss.
        gradInput: The last result of :meth:`backward`.

    Example:
        >>> criterion = Criterion(nn.MSELoss())
        >>> criterion.forward(torch.ones(2), torch.zeros(2))
        tensor(1.)
        >>> criterion.backward(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])

    Source: torch/nn's ``Criterion``, whose loss is a number; here it is a scalar outside of any
    graph, which does not wait for a GPU.
    """

    def __init__(self, loss_fn: Callable[[Nested, Nested], Tensor]) -> None:
        self._loss_fn = loss_fn
        self._graph: _Graph | None = None
        self._target: Nested = None
        self.output: Tensor = torch.empty(0)
        self.gradInput: Nested = torch.empty(0)

    def forward(self, input: Nested, target: Nested) -> Tensor:
        """Return the loss."""
        self._target = target
        self._graph = _Graph(lambda own: self._loss_fn(own, target), input, True)
        self.output = self._graph.output
        return self.output

    def backward(self, input: Nested, target: Nested) -> Nested:
        """Return the gradient of the loss by ``input``, nested like it.

        Raises:
            StateError: ``forward(input, target)`` was not the last forward pass.
        """
        graph = _checked(self._graph)
        _check_same("target", target, self._target)
        self.gradInput, _ = graph.gradients(input, torch.ones_like(self.output), [])
        return self.gradInput

    def __call__(self, input: Nested, target: Nested) -> Tensor:
        """Return the loss as PyTorch does, in the caller's graph."""
        return self._loss_fn(input, target)


def inner_module(module: nn.Module | Explicit) -> nn.Module:
    """Return a module, that of an `Explicit` where it is one."""
    found = module.module if isinstance(module, Explicit) else module
    check_argument(isinstance(found, nn.Module), "module", "be an `nn.Module`", found)
    return found


class _Graph:
    """One forward pass, and the graph that autograd made of it: none under `torch.no_grad()`.

    Args:
        run: Called with ``given``, whose leaves are cut off from any graph.
        wants_grad_input: Whether gradients of the input are computed.

    Attributes:
        output: What ``run`` returned, as plain values outside of any graph.
    """

    def __init__(
        self, run: Callable[[Nested], Nested], given: Nested, wants_grad_input: bool
    ) -> None:
        leaves, self._spec = flatten(given)
        self.is_there = torch.is_grad_enabled()
        self._wants_grad_input = wants_grad_input
        self._inputs = [_own_leaf(leaf, wants_grad_input and self.is_there) for leaf in leaves]
        self._outputs, self._output_spec = flatten(run(unflatten(self._inputs, self._spec)))
        plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._outputs]
        self.output = unflatten(plain, self._output_spec)

    def gradients(
        self,
        given: Nested,
        grad_output: Nested,
        parameters: Sequence[nn.Parameter] = (),
        *,
        of_inputs: bool = True,
    ) -> tuple[Nested, Sequence[Tensor]]:
        """Return the gradients of the input, nested like it, and of ``parameters``."""
        _check_same("input", given, unflatten(self._inputs, self._spec))
        grads, spec = flatten(grad_output)
        if spec != self._output_spec:
            raise ConfigError(
                f"`gradOutput` must be nested like the output, {self._output_spec}, but is nested "
                f"like {spec}."
            )
        ends = [
            (output, grad.detach().to(output))
            for output, grad in zip(self._outputs, grads, strict=True)
            if _needs_gradient(output) and grad is not None
        ]
        inputs = [each for each in self._inputs if of_inputs and _needs_gradient(each)]
        wanted = [*inputs, *parameters]
        found: Sequence[Tensor] = [torch.zeros_like(each) for each in wanted]
        if ends and wanted:
            outputs, out_grads = zip(*ends, strict=True)
            found = torch.autograd.grad(
                outputs, wanted, out_grads, retain_graph=True, materialize_grads=True
            )
        if not self._wants_grad_input or not of_inputs:
            return None, found[len(inputs) :]
        arrived = iter(found)
        nested = [next(arrived) if _needs_gradient(each) else None for each in self._inputs]
        return unflatten(nested, self._spec), found[len(inputs) :]


@torch.no_grad()
def _accumulate(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: float
) -> None:
    """Add ``scale`` times the gradients to those of the parameters, in place."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.add_(gradient, alpha=scale)


# Any, from here on: a leaf of the user's own inputs.
def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _checked(graph: _Graph | None) -> _Graph:
    """Return the graph of the last forward pass.

    Raises:
        StateError: No forward pass left one.
    """
    if graph is None or not graph.is_there:
        raise StateError(
            "A pass back needs the graph of a forward pass, but has no graph. Call "
            "`forward(input)` first, outside of `torch.no_grad()`; `updateParameters()` and "
            "`clearState()` end a pass."
        )
    return graph


def _check_same(name: str, given: Nested, known: Nested) -> None:
    """Refuse what is not that of the last forward pass, by memory or, failing that, by values."""
    leaves, spec = flatten(given)
    others, others_spec = flatten(known)
    if spec != others_spec or not all(map(_same, leaves, others)):
        raise StateError(
            f"`{name}` must be that of the last forward pass, but is another. Call `forward()` "
            "with it first."
        )


def _own_leaf(leaf: Any, wants_gradient: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    own = leaf.detach()
    can = own.is_floating_point() or own.is_complex()
    return own.requires_grad_(wants_gradient and can)


def _same(leaf: Any, own: Any) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(own, Tensor):
        return leaf is own or bool(leaf == own)
    if (leaf.shape, leaf.dtype, leaf.device) != (own.shape, own.dtype, own.device):
        return False
    is_one = leaf.data_ptr() == own.data_ptr() and leaf.stride() == own.stride()
    return is_one or torch.equal(leaf, own)
