"""A module that nothing trains, such as a loss with weights of classes, on every replica's device.

loss on cuda:0   weight ─┬─ replica 0, on cuda:0: the loss itself
                         └─ replica 1, on cuda:1: one with a copy of weight, and the same else
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from phalanx.replicas.tensor_version import TensorVersion

__all__ = ["FrozenCopies"]


class FrozenCopies:
    """Copies of a module's tensors, for replicas that lie elsewhere.

    One that is to be trained, or that holds a parameter which is, stays what and where it is.

    Example:
        >>> loss = nn.CrossEntropyLoss(weight=torch.ones(3))
        >>> copies = FrozenCopies(loss)
        >>> copies.on(torch.device("cpu")) is loss
        True
        >>> copies.on(torch.device("meta")).weight.device
        device(type='meta')
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # For each thread: nobody else waits for a copy.
        self._kept = threading.local()

    def on(self, device: torch.device) -> nn.Module:
        """Return the module with all its parameters and buffers on ``device``.

        Moves: those that lie elsewhere, once for each thread and whenever they have changed.
        """
        tensors = [*self._module.parameters(), *self._module.buffers()]
        if all(each.device == device for each in tensors) or any(
            each.requires_grad for each in tensors
        ):
            return self._module
        kept: dict[str, tuple[TensorVersion, Tensor]] = vars(self._kept).setdefault("by_name", {})

        def placed(name: str, tensor: Tensor) -> Tensor:
            version, found = kept.get(name, (TensorVersion(), tensor))
            if not version.is_still(tensor) or found.device != device:
                found = tensor.detach().to(device)
                kept[name] = TensorVersion(tensor), found
            return found

        return _twin(self._module, "", placed, {})


def _twin(
    module: nn.Module,
    path: str,
    placed: Callable[[str, Tensor], Tensor],
    made: dict[int, nn.Module],
) -> nn.Module:
    """Return a module with other tensors, and whose attributes are those of ``module`` else."""
    if id(module) in made:
        return made[id(module)]
    twin = made[id(module)] = copy.copy(module)
    twin._parameters = {
        name: None if each is None else nn.Parameter(placed(f"{path}.{name}", each), False)
        for name, each in module._parameters.items()
    }
    twin._buffers = {
        name: None if each is None else placed(f"{path}.{name}", each)
        for name, each in module._buffers.items()
    }
    twin._modules = {
        name: None if each is None else _twin(each, f"{path}.{name}", placed, made)
        for name, each in module._modules.items()
    }
    return twin
