"""Torch7's names for what a module can do, as one base class."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.compat.torch7.explicit_pass import ExplicitPass
from phalanx.compat.torch7.flat_views import Flat
from phalanx.errors import ConfigError
from phalanx.parallel import Unwrapped
from phalanx.types import Nested

# Which module is being called as PyTorch calls modules; otherwise `forward()` is Torch7's. It is
# not an attribute of the module, because several threads may call one module at a time.
_CALLED: ContextVar[nn.Module | None] = ContextVar("_CALLED", default=None)


class Torch7Module(nn.Module):
    """The base of all classes of this package.

    Explicit passes go through autograd. `forward(input)` cuts its input off from any graph, keeps
    the graph of the module, and returns plain values; the passes back go through that graph, as
    often as asked, until the next `forward`, `updateParameters` or `clearState`. Called as PyTorch
    calls modules, ``module(input)``, it is a module like any other, in the caller's graph.

    `parameters()` stays PyTorch's iterator, which optimizers need.
    """

    # Any: whatever the container behind takes.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pass = ExplicitPass()
        self._flat_memory = Flat()

    # Any: the module's own signature.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _CALLED.set(self)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _CALLED.reset(token)

    # Any: the module's own signature.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on one input, tensor or nested, and return its output as plain values."""
        if _CALLED.get() is self:
            return super().forward(*args, **kwargs)
        return self.updateOutput(*args, **kwargs)

    def updateOutput(self, input: Nested) -> Nested:
        """Do what `forward` does."""
        return self._pass.forward(self, input)

    def updateGradInput(self, input: Nested, gradOutput: Nested) -> Nested:
        """Return the gradient of the input, nested like it, and leave parameters alone.

        Leaves that cannot have a gradient (integers) have None.

        Raises:
            StateError: ``input`` is not that of the last forward pass.
            ConfigError: ``gradOutput`` is not nested like the output.
        """
        return self._pass.input_gradients(input, gradOutput)

    def accGradParameters(self, input: Nested, gradOutput: Nested, scale: float = 1.0) -> None:
        """Add ``scale`` times the parameters' gradients to their ``grad``."""
        self._pass.accumulate(input, gradOutput, self._trainable(), scale)

    def backward(self, input: Nested, gradOutput: Nested, scale: float = 1.0) -> Nested:
        """Do both, in one pass over the graph, and return the gradient of the input."""
        if scale == 1:
            return self._pass.backward(input, gradOutput, self._trainable())
        gradient = self.updateGradInput(input, gradOutput)
        self.accGradParameters(input, gradOutput, scale)
        return gradient

    def accUpdateGradParameters(self, input: Nested, gradOutput: Nested, lr: float) -> None:
        """Subtract ``lr`` times the parameters' gradients from them, and leave ``grad`` alone."""
        parameters = self._trainable()
        found = self._pass.parameter_gradients(input, gradOutput, parameters)
        self._step(zip(parameters, found, strict=True), lr)

    def zeroGradParameters(self) -> None:
        """Zero all gradients in their memory; parameters that have none get zeros."""
        self.zero_grad(set_to_none=False)
        self._flat_memory.zero_missing(self)

    def updateParameters(self, lr: float) -> None:
        """Subtract ``lr`` times their gradients from the parameters, in place."""
        self._step(((parameter, parameter.grad) for parameter in self.parameters()), lr)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; those that lie in one flat tensor become zero and stay there."""
        super().zero_grad(set_to_none and not self._flat_memory.is_laid_out(self))

    def getParameters(self) -> tuple[Tensor, Tensor]:
        """Return all parameters as one tensor, and all gradients as another, of the same size.

        Every parameter and its ``grad`` is a view of them from now on. Of a part of a model that is
        flat already these are views of the model's own, so both stay right in either order.

        Raises:
            UnsupportedError: Parameters differ in dtype or device.
        """
        return self._flat_memory.tensors(self)

    @property
    def output(self) -> Nested:
        """The output of the last explicit forward pass."""
        return self._pass.output

    @property
    def gradInput(self) -> Nested:
        """The gradient of the input from the last pass back; None when switched off.

        Set to None, gradients of inputs are not computed from the next forward pass on (Torch7's
        speed-up for the outermost module); set to anything else, they are again.
        """
        return self._pass.grad_input if self._pass.wants_grad_input else None

    @gradInput.setter
    def gradInput(self, value: Nested) -> None:
        self._pass.wants_grad_input = value is not None

    def evaluate(self) -> Self:
        """Switch training mode off, in all modules inside too."""
        return self.eval()

    def clone(self, *names: str) -> Self:
        """Return a deep copy; with ``names``, it shares its parameters of these names with this."""
        made = copy.deepcopy(self)
        return made.share(self, *names) if names else made

    def share(self, other: nn.Module, *names: str) -> Self:
        """Make parameters of this module the very parameters of ``other``, of the same names.

        Args:
            names: Such as ``"weight"`` and ``"bias"``, all by default. Gradients belong to their
                parameters, so ``"gradWeight"`` and the like follow and may be left out.

        Raises:
            ConfigError: A parameter is in ``other`` only, or in another shape, or ``names`` name
                none. Nothing has changed then.
        """
        wanted = {name for name in names if not name.startswith("grad")}
        theirs = {
            name: parameter
            for name, parameter in other.named_parameters(remove_duplicate=False)
            if not names or name.rpartition(".")[2] in wanted
        }
        if names and not theirs:
            raise ConfigError(
                f"`names` must hold names of parameters of `other`, but holds {names!r}. Gradients "
                "follow their parameters: give 'weight' or 'bias'."
            )
        own = dict(self.named_parameters(remove_duplicate=False))
        for name, parameter in theirs.items():
            if name not in own or own[name].shape != parameter.shape:
                shape = tuple(own[name].shape) if name in own else "none of that name"
                raise ConfigError(
                    f"`other` must have parameters of the same names and shapes, but has `{name}` "
                    f"of shape {tuple(parameter.shape)}, and this module {shape}."
                )
        for name, parameter in theirs.items():
            path, _, key = name.rpartition(".")
            # Not `register_parameter()`: recurrent layers keep a second list of their weights.
            setattr(self.get_submodule(path), key, parameter)
        return self

    def reset(self, stdv: float | None = None) -> Self:
        """Let every module inside draw its parameters again by its ``reset_parameters()``.

        Args:
            stdv: Draw all parameters of layers with weights of two dims or more uniformly around 0
                with this standard deviation; default: as each layer does by itself.

        Raises:
            ConfigError: No module draws a parameter; nothing has changed then.
        """
        functions: list[Callable[[], object]] = []
        uniform: list[nn.Parameter] = []
        reached: set[int] = set()
        for module in reversed(list(self.modules())):  # outer ones have the last word
            function = None if isinstance(module, Unwrapped) else _redrawing(module)
            if function is not None:
                functions.append(function)
                reached.update(map(id, module.parameters()))
            own = [] if stdv is None else list(module.parameters(recurse=False))
            if any(parameter.dim() >= 2 for parameter in own):
                uniform += own
        reached.update(map(id, uniform))
        names = [name for name, each in self.named_parameters() if id(each) not in reached]
        if names:
            raise ConfigError(
                "Every parameter must belong to a module with `reset_parameters()` to be drawn "
                f"again, but {names[0]!r} does not. Write that method in its module, or in one "
                "around it."
            )
        for function in functions:
            function()
        for parameter in uniform:
            assert stdv is not None
            nn.init.uniform_(parameter, -stdv * math.sqrt(3), stdv * math.sqrt(3))
        return self

    def clearState(self) -> Self:
        """Forget outputs, gradients of inputs and graphs, in all modules inside too."""
        for module in self.modules():
            if isinstance(module, Torch7Module):
                module._pass.forget()
        return self

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def _step(self, pairs: Iterable[tuple[Tensor, Tensor | None]], lr: float) -> None:
        with torch.no_grad():
            for parameter, gradient in pairs:
                if gradient is not None:
                    parameter.add_(gradient, alpha=-lr)
        self._pass.forget_graph()  # it was of the old values


def _redrawing(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that draws a module's parameters; attention layers have a private one."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((each for each in found if callable(each)), None)
