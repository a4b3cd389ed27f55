"""Torch7's names for what a module can do, as one base class."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.compat.torch7.explicit_pass import ExplicitPass
from phalanx.compat.torch7.flat_views import Flat
from phalanx.compat.torch7.tensor_types import parse_tensor_type, tensor_type_of
from phalanx.errors import ConfigError
from phalanx.parallel import (
    AbstractParallel,
    DataParallel,
    OnDevice,
    redraw,
)
from phalanx.types import Nested

__all__ = ["Torch7Module", "is_called"]

# Which module is being called as PyTorch calls modules; otherwise `forward()` is Torch7's. It is
# not an attribute of the module, because several threads may call one module at a time.
_CALLED: ContextVar[nn.Module | None] = ContextVar("_CALLED", default=None)


def is_called(module: nn.Module) -> bool:
    """Tell whether ``module`` is being called as PyTorch calls modules."""
    return _CALLED.get() is module


class _Training(int):
    """Whether a module is in training mode, as PyTorch reads it; called, the switch of Torch7."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return self.module.train()


class Torch7Module(nn.Module):
    """What all classes of this package have in common.

    Explicit passes go through autograd. `forward(input)` cuts its input off from any graph, keeps
    the graph of the module, and returns plain values; the passes back go through that graph, as
    often as asked, until the next `forward`, `updateParameters` or `clearState`. Called as PyTorch
    calls modules, ``module(input)``, it is a module like any other, in the caller's graph.

    `parameters()` stays PyTorch's iterator, which optimizers need; what Torch7 returns under that
    name is :meth:`parametersAndGradients`.
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

    # Any: an attribute of the user's own module.
    def __setattr__(self, name: str, value: Any) -> None:
        """Keep what is a property here; containers hand tensors on to the module inside."""
        if isinstance(getattr(Torch7Module, name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # Any: the module's own signature.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on one input, tensor or nested, and return its output as plain values."""
        if is_called(self):
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
            ConfigError: ``gradOutput`` is not nested or shaped like the output.
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

    def parametersAndGradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters, and their gradients, which are zeros where there were none.

        It is Torch7's ``parameters()``.
        """
        found = self._trainable()
        self._flat_memory.zero_missing(self)
        return list(found), [p.grad for p in found if p.grad is not None]

    def getParameters(self) -> tuple[Tensor, Tensor]:
        """Return all parameters as one tensor, and all gradients as another, of the same size.

        Every parameter and its ``grad`` is a view of them from now on. Of a part of a model that is
        flat already these are views of the model's own, so both stay right in either order.

        Raises:
            UnsupportedError: Parameters differ in dtype or device.
        """
        return self._flat_memory.tensors(self)

    # What follows is named like builtins and attributes of PyTorch, because Torch7 named it so.

    @property
    def output(self) -> Nested:
        """What the last explicit forward pass returned."""
        return self._pass.output

    @property
    def gradInput(self) -> Nested:
        """What the last pass back returned; None when switched off.

        Set to None, gradients of inputs are not computed from the next forward pass on (Torch7's
        speed-up for the outermost module); set to anything else, they are again.
        """
        return self._pass.grad_input if self._pass.wants_grad_input else None

    @gradInput.setter
    def gradInput(self, value: Nested) -> None:
        self._pass.wants_grad_input = value is not None

    @property
    def training(self) -> Any:  # Any: a truth value that can be called
        """Whether the module is in training mode; ``training()`` switches it on, all inside too."""
        mode = _Training(self.__dict__["_is_training"])
        mode.module = self
        return mode

    @training.setter
    def training(self, value: bool) -> None:
        self.__dict__["_is_training"] = bool(value)

    def train(self, mode: bool = True) -> Self:
        """Switch training mode, in all modules inside too, to what `training` was, for one."""
        return super().train(bool(mode))

    def evaluate(self) -> Self:
        """Switch training mode off, in all modules inside too."""
        return self.eval()

    def apply(self, callback: Callable[[nn.Module], object]) -> Self:
        """Call ``callback`` with this module, then with every one inside, outer ones first."""
        for module in self.listModules():
            callback(module)
        return self

    def listModules(self) -> list[nn.Module]:
        """Return this module and all inside, outer ones first."""
        return list(self.modules())

    # Any: `type` is a method here.
    def findModules(self, kind: Any) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return all modules of one kind, and for each the module that it stands in.

        Args:
            kind: A class, or its name, with or without what stands before it (``"nn.ReLU"``).
        """
        name = kind.rpartition(".")[2] if isinstance(kind, str) else None

        def fits(module: nn.Module) -> bool:
            if name is None:
                return isinstance(module, kind)
            return module.__class__.__name__ == name

        parent_of = {child: module for module in self.modules() for child in module.children()}
        found = [module for module in self.listModules() if fits(module)]
        return found, [parent_of.get(module, self) for module in found]

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
            ConfigError: A parameter is in ``other`` only, or in another shape, or ``names`` are
                names of gradients only.
        """
        known = tuple(name for name in names if not name.startswith("grad"))
        if names and not known:
            raise ConfigError(
                f"`names` must hold names of parameters, but holds {names!r}. Gradients follow "
                "their parameters: give 'weight' or 'bias'."
            )
        self._share(other, known)
        return self

    def reset(self, stdv: float | None = None) -> Self:
        """Let every layer draw its parameters anew; replicas stay equal.

        Args:
            stdv: Draw all parameters of layers with weights of two dims or more uniformly around 0
                with this standard deviation; default: as each layer does by itself.

        Raises:
            ConfigError: A layer with parameters does not say how; nothing has changed then.
        """
        layers = list(self._layers())[::-1]  # outer ones have the last word
        uniform: list[nn.Parameter] = []
        for own in [list(layer.parameters(recurse=False)) for layer in layers]:
            if stdv is not None and any(parameter.dim() >= 2 for parameter in own):
                uniform += own
        drawn = list(uniform)
        if type(self).reset is not Torch7Module.reset:  # which calls this one
            drawn += self.parameters(recurse=False)
        redraw(self, layers, drawn)
        for parameter in uniform:
            assert stdv is not None
            nn.init.uniform_(parameter, -stdv * math.sqrt(3), stdv * math.sqrt(3))
        return self

    # Any: torch's own method takes a dtype or a name, and returns the module; the getter, a name.
    def type(self, dst_type: Any = None) -> Any:
        """Return the type of the parameters, such as ``"torch.FloatTensor"``, or convert them.

        Asking changes nothing. Names of Torch7, PyTorch and dtypes are known:
        ``"torch.CudaTensor"``, ``"torch.cuda.FloatTensor"``, ``torch.float64``.
        """
        if dst_type is None:
            return tensor_type_of(self)
        device, dtype = parse_tensor_type(dst_type)
        kinds = {parameter.device.type for parameter in self.parameters()}
        if device is not None and kinds - {device.type}:
            self.to(device)
            for module in self.modules():
                if isinstance(module, Torch7Module):
                    module._place(device)
        return self.to(dtype)

    def clearState(self) -> Self:
        """Forget outputs, gradients of inputs and graphs, in all modules inside too."""
        for module in self.modules():
            if isinstance(module, Torch7Module):
                module._pass.forget()
        return self

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    # Any: pairs of a parameter and its gradient or None.
    def _step(self, pairs: Any, lr: float) -> None:
        with torch.no_grad():
            for parameter, gradient in pairs:
                if gradient is not None:
                    parameter.add_(gradient, alpha=-lr)
        self._pass.forget_graph()  # it was of the old values

    def _share(self, other: nn.Module, names: tuple[str, ...]) -> None:
        raise NotImplementedError

    def _place(self, device: torch.device) -> None:
        """Take children there that have devices of their own, after all was moved to ``device``."""

    def _layers(self) -> Iterator[nn.Module]:
        """Yield the modules inside that hold no other module under a second name."""
        holders = (Torch7Module, AbstractParallel, DataParallel, OnDevice)
        return (module for module in self.modules() if not isinstance(module, holders))
