"""Torch7's calls for ordinary modules and losses of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat.torch7.explicit_pass import ExplicitPass, same_leaves
from phalanx.compat.torch7.module import Torch7Module
from phalanx.errors import StateError
from phalanx.parallel import Unwrapped
from phalanx.plan import check_argument
from phalanx.types import Nested


class _Called(Unwrapped):
    """Runs the module that it holds."""

    # Any: the module's own signature.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)


class Explicit(Torch7Module, _Called):
    """Give an ordinary module Torch7's explicit passes; it is trained in place.

    Containers of this package have them already. Parameters, keys of `state_dict()` and attributes
    are the module's own.

    Args:
        module: The module.

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

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        check_argument(isinstance(module, nn.Module), "module", "be an `nn.Module`", module)
        self.module = module

    def get(self, index: int) -> nn.Module:
        """Return child ``index`` of the module, counted from 0."""
        return list(self.module.children())[index]


class Criterion:
    """Give an ordinary loss Torch7's two calls.

    Args:
        loss_fn: Called as ``loss_fn(input, target)``; returns a scalar.

    Attributes:
        output: The last loss.

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
        self._pass = ExplicitPass()
        self._target: Nested = None

    @property
    def output(self) -> Tensor:
        """The last loss."""
        found: Tensor = self._pass.output
        return found

    @property
    def gradInput(self) -> Nested:
        """The last result of :meth:`backward`."""
        return self._pass.grad_input

    def forward(self, input: Nested, target: Nested) -> Tensor:
        """Return the loss."""
        self._target = target
        self._pass.forward(lambda own: self._loss_fn(own, target), input)
        return self.output

    def backward(self, input: Nested, target: Nested) -> Nested:
        """Return the gradient of the loss by ``input``, nested like it.

        Raises:
            StateError: ``forward(input, target)`` was not the last forward pass.
        """
        if not same_leaves(target, self._target):
            raise StateError(
                "`target` must be that of the last forward pass, but is another. Call "
                "`forward(input, target)` with it first."
            )
        return self._pass.input_gradients(input, torch.ones_like(self.output))

    def __call__(self, input: Nested, target: Nested) -> Tensor:
        """Return the loss as PyTorch does, in the caller's graph."""
        return self._loss_fn(input, target)
