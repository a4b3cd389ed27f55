"""Parameters and gradients as two flat tensors: Torch7's ``getParameters()``.

    parameters   | weight 0 ..| bias 0 | weight 1 .... | bias 1 |
    gradients    | weight 0 ..| bias 0 | weight 1 .... | bias 1 |     the same places

A parameter keeps the order in which its elements lay in memory (channels_last stays channels_last).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError
from phalanx.memory import dense_strides, refuse_overlap


def flat_parameters(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return all parameters as one tensor, and all gradients as another.

    The module's own parameters, and their `grad`, become views of the two, unless they are already:
    in a model that was laid out as a whole every part is, too.

    Raises:
        UnsupportedError: Parameters differ in dtype or device.
        ConfigError: Two parameters lie over each other in memory.
    """
    parameters = list(module.parameters())
    kinds = {f"{each.dtype} on {each.device}" for each in parameters}
    if len(kinds) > 1:
        raise UnsupportedError(
            "`getParameters()` needs parameters of one dtype on one device, but the module has "
            f"{', '.join(sorted(kinds))}. Train it with an optimizer over `parameters()`."
        )
    if not parameters:
        return torch.empty(0), torch.empty(0)
    values = _as_one(parameters)
    gradients = _as_one([each.grad for each in parameters if each.grad is not None])
    if values is None or gradients is None or gradients.shape != values.shape:
        refuse_overlap(parameters)
        values, gradients = _lay_out(parameters)
    return values, gradients


def _lay_out(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters and gradients into new memory."""
    size = sum(each.numel() for each in parameters)
    values = torch.empty(size, dtype=parameters[0].dtype, device=parameters[0].device)
    gradients = torch.zeros_like(values)
    start = 0
    for parameter in parameters:
        place = parameter.shape, dense_strides(parameter), start
        value, gradient = values.as_strided(*place), gradients.as_strided(*place)
        value.copy_(parameter.detach())
        if parameter.grad is not None:
            gradient.copy_(parameter.grad)
        parameter.data = value
        parameter.grad = gradient if parameter.requires_grad else None
        start += parameter.numel()
    return values, gradients


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the 1-D tensor whose consecutive pieces ``tensors`` are, if they are."""
    if not tensors:
        return None
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
