"""One full copy of the model on one device."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from phalanx.errors import ConfigError
from phalanx.memory import in_memory_order
from phalanx.replicas.statistics import StatisticsOfReplica

__all__ = ["Replica", "add_gradients"]


class Replica:
    """A copy of ``source`` that one thread runs.

    On the source's own device the copy's parameters lie in the very memory of the source's, so
    there is nothing to refresh; on another device they are copies. Buffers are always the replica's
    own.

    Args:
        source: The module that the user trains.
        device: Where this replica computes.
        index: Its number, for errors.

    Attributes:
        module: The copy.
        parameters: Its parameters, in the order of ``source.parameters()``.
    """

    def __init__(self, source: nn.Module, device: torch.device, index: int) -> None:
        self.index = index
        self.device = device
        self._originals = list(source.parameters())
        with torch.inference_mode(False), torch.no_grad():
            self.module = _copy_module(source, device)
        self.parameters = list(self.module.parameters())
        self.statistics = StatisticsOfReplica(source, self.module)
        self._modes = list(zip(source.modules(), self.module.modules(), strict=True))
        self._shared = [original.device == device for original in self._originals]
        self._versions = [-1] * len(self._originals)

    def refresh(self) -> None:
        """Take over what has changed in the source: modes, freezing, buffers, remote values."""
        for source, copied in self._modes:
            copied.training = source.training
        for place, (original, own) in enumerate(zip(self._originals, self.parameters, strict=True)):
            if own.requires_grad != original.requires_grad:
                own.requires_grad_(original.requires_grad)
            if not self._shared[place] and self._versions[place] != original._version:
                own.data.copy_(original.data, non_blocking=True)
                self._versions[place] = original._version
        self.statistics.refresh()

    def outdate(self) -> None:
        """Make the next :meth:`refresh` copy all remote values, whatever their versions say."""
        self._versions = [-1] * len(self._originals)

    def take_gradients(self) -> list[Tensor | None]:
        """Return and forget all gradients, in memory order, on the source's device."""
        gradients: list[Tensor | None] = []
        for parameter, original in zip(self.parameters, self._originals, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                gradient = in_memory_order(gradient, parameter).to(original.device)
            gradients.append(gradient)
        return gradients

    def drop_gradients(self) -> None:
        """Forget what a failed microbatch left behind."""
        for parameter in self.parameters:
            parameter.grad = None


def _copy_module(source: nn.Module, device: torch.device) -> nn.Module:
    """Deep-copy ``source`` with parameters in the same memory where ``device`` is the same."""
    for name, parameter in source.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"Parameter `{name}` must have a shape before the module is copied, but "
                "is lazy. Run the module once on a sample batch first."
            )
    memo: dict[int, object] = {id(p): _alias(p) for p in source.parameters()}
    try:
        module = copy.deepcopy(source, memo)
    except Exception as error:
        error.add_note(
            f"`{type(source).__name__}` must be copyable by `copy.deepcopy` to be run on replicas."
        )
        raise
    for parameter in module.parameters():
        parameter.grad = None
    return module.to(device)


def _alias(parameter: nn.Parameter) -> Tensor:
    alias = torch.Tensor._make_subclass(type(parameter), parameter.data, parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias


def add_gradients(
    left: Sequence[Tensor | None], right: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Add ``right`` to ``left``, in place, and return the sum; None stands for no gradient."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
