"""Parameters and gradients as two flat tensors, wherever they lie flat already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError
from phalanx.memory import FlatParameters, dense_strides

__all__ = ["Flat"]


class Flat:
    """Lays the parameters of one module out, and their gradients, one after another.

    Inside a model that is laid out as a whole every part is, too; then nothing is moved. A copy,
    deep or pickled, knows nothing: it looks where its module's parameters lie.
    """

    def __init__(self) -> None:
        self._made: FlatParameters | None = None

    def __reduce__(self) -> tuple[type[Flat], tuple[()]]:
        return type(self), ()

    def lay_out(self, module: nn.Module) -> None:
        """Move what lies elsewhere; each dtype on each device has a buffer of its own."""
        if not all(_as_one(parameters) is not None for parameters in _by_kind(module)):
            self._make(module)

    def is_laid_out(self, module: nn.Module) -> bool:
        """Tell whether parameters and gradients lie one after another, whoever put them there."""
        return all(
            _as_one(parameters) is not None and _gradients_as_one(parameters) is not None
            for parameters in _by_kind(module)
        )

    def zero_missing(self, module: nn.Module) -> None:
        """Give zeros to parameters that have no gradient, in its place where they lie flat."""
        if self._made is not None and self._holds(module):
            self._made.keep_gradients([parameter.grad for parameter in self._made.parameters])
        for parameter in module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def tensors(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return all parameters of ``module`` as one tensor, and their gradients as another.

        Raises:
            UnsupportedError: They differ in dtype or device, so that no one tensor can hold them.
        """
        kinds = _by_kind(module)
        if not kinds:
            return torch.empty(0), torch.empty(0)
        if len(kinds) > 1:
            told = ", ".join(f"{kind[0].dtype} on {kind[0].device}" for kind in kinds)
            raise UnsupportedError(
                "`getParameters()` needs parameters of one dtype on one device, but the module has "
                f"{told}. Train it with an optimizer over `parameters()`."
            )
        if self._holds(module):
            self.zero_missing(module)
        elif not self.is_laid_out(module):
            self._make(module)
        values, gradients = _as_one(kinds[0]), _gradients_as_one(kinds[0])
        assert values is not None  # just laid out
        assert gradients is not None
        return values, gradients

    def _make(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        gradients = [parameter.grad for parameter in parameters]
        self._made = FlatParameters(parameters)
        self._made.keep_gradients(gradients)

    def _holds(self, module: nn.Module) -> bool:
        if self._made is None:
            return False
        found = list(module.parameters())
        return list(map(id, found)) == list(map(id, self._made.parameters)) and self._made.intact()


def _by_kind(module: nn.Module) -> list[list[nn.Parameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(kinds.values())


def _gradients_as_one(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return the flat tensor of the gradients, if it has the order of the flat parameters."""
    found = [parameter.grad for parameter in parameters]
    alike = [
        gradient
        for gradient, parameter in zip(found, parameters, strict=True)
        if gradient is not None and gradient.stride() == parameter.stride()
    ]
    return _as_one(alike) if len(alike) == len(found) else None


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the 1-D tensor whose consecutive pieces ``tensors`` are, if they are."""
    first = tensors[0]
    start = stop = first.storage_offset()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or tensor.storage_offset() != stop
            or tensor.stride() != dense_strides(tensor)
        ):
            return None
        stop += tensor.numel()
    return first.detach().as_strided((stop - start,), (1,), start)
