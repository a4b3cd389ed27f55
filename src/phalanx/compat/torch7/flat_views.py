"""Parameters and gradients as two flat tensors: Torch7's ``getParameters()``.

    parameters   | weight 0 ..| bias 0 | weight 1 .... | bias 1 |     one buffer per dtype, device
    gradients    | weight 0 ..| bias 0 | weight 1 .... | bias 1 |     the same places

The module's own parameters become views of the buffer, so a write there trains the module. A
parameter keeps the order in which its elements lay in memory (channels_last stays channels_last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.errors import UnsupportedError
from phalanx.memory import dense_strides, refuse_overlap


@dataclass(frozen=True)
class _Place:
    """A parameter, and where it and its gradient lie in the buffers."""

    parameter: nn.Parameter
    value: Tensor
    gradient: Tensor

    def move_gradients(self) -> RemovableHandle:
        """Let each gradient that autograd makes elsewhere (after ``grad = None``) move here."""
        hook: RemovableHandle = self.parameter.register_post_accumulate_grad_hook(
            self._move_gradient
        )
        return hook

    def _move_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self.is_held():
            return
        if gradient.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(gradient)
            parameter.grad = self.gradient

    def is_held(self) -> bool:
        """Tell whether the parameter is still there (``module.to()`` moves it)."""
        return self.parameter.data_ptr() == self.value.data_ptr() or not self.value.numel()

    def keep_gradient(self) -> None:
        """Make the parameter's ``grad`` its place in the buffer, with the value that it has."""
        if self.parameter.grad is None:
            self.gradient.zero_()
        else:
            self.gradient.copy_(self.parameter.grad)
        self.parameter.grad = self.gradient if self.parameter.requires_grad else None


class Flat:
    """Lays the parameters of one module out, and their gradients, one after another.

    Inside a model that is laid out as a whole every part is, too; then nothing is moved. A copy,
    deep or pickled, knows nothing: it looks where its module's parameters lie.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._hooks: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[type[Flat], tuple[()]]:
        return type(self), ()

    def lay_out(self, module: nn.Module) -> None:
        """Move what lies elsewhere; each dtype on each device has its own buffer."""
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
        if self._holds(module):
            for place in self._places:
                place.keep_gradient()
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
        """Move all parameters and gradients into new buffers.

        Ties stay, because a tied parameter is one object. Frozen parameters get no gradient.

        Raises:
            ConfigError: Two parameters lie over each other in memory.
        """
        refuse_overlap(list(module.parameters()))
        placed = [place for kind in _by_kind(module) for place in _laid_out(kind)]
        for hook in self._hooks:
            hook.remove()
        self._hooks = [p.move_gradients() for p in placed if p.parameter.requires_grad]
        in_order = {id(place.parameter): place for place in placed}
        self._places = [in_order[id(parameter)] for parameter in module.parameters()]

    def _holds(self, module: nn.Module) -> bool:
        own = [place.parameter for place in self._places]
        return (
            bool(own)
            and list(map(id, module.parameters())) == list(map(id, own))
            and all(place.is_held() for place in self._places)
        )


def _laid_out(parameters: Sequence[nn.Parameter]) -> list[_Place]:
    """Move parameters of one kind, and their gradients, into two new buffers."""
    starts = [0, *accumulate(parameter.numel() for parameter in parameters)]
    values = torch.zeros(starts.pop(), dtype=parameters[0].dtype, device=parameters[0].device)
    gradients = torch.zeros_like(values)
    places = []
    for parameter, start in zip(parameters, starts, strict=True):
        shape, strides = parameter.shape, dense_strides(parameter)
        place = _Place(
            parameter,
            values.as_strided(shape, strides, start),
            gradients.as_strided(shape, strides, start),
        )
        place.value.copy_(parameter.detach())
        parameter.data = place.value
        place.keep_gradient()
        places.append(place)
    return places


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
