"""Parameters and buffers by name: copied out, copied in, and shared."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.plan import check_argument


# Any, here and below: tensors or arrays.
def copy_out(*pairs: tuple[Mapping[str, Tensor], MutableMapping[str, Any]]) -> None:
    """Copy every tensor into that of its name, or add a copy; other names are left alone.

    Raises:
        ConfigError: One has another shape; nothing is written then.
    """
    for known, into in pairs:
        _check_shapes(into, known)
    for name, tensor, into in [(*item, into) for known, into in pairs for item in known.items()]:
        own = tensor.detach()
        if name not in into:
            into[name] = own.clone()
        elif isinstance(into[name], Tensor):
            into[name].copy_(own)
        else:
            into[name][...] = own.cpu().numpy()


def copy_into(
    known: Mapping[str, Tensor],
    given: Mapping[str, Any],
    *,
    allow_extra: bool,
    allow_missing: bool,
) -> None:
    """Copy tensors or arrays into those of their names.

    Raises:
        ConfigError: Names are missing or extra and that is not allowed, or a shape differs; nothing
            is written then.
    """
    missing, extra = sorted(known.keys() - given), sorted(given.keys() - known)
    for names, allowed, told in (
        (missing, allow_missing, "missing"),
        (extra, allow_extra, "extra"),
    ):
        if names and not allowed:
            raise ConfigError(
                "`arg_params` and `aux_params` must hold the module's names, but of these are "
                f"{told}: {names}. Give allow_{told}=True to let it be."
            )
    _check_shapes(given, known)
    values = {name: torch.as_tensor(given[name]) for name in known if name in given}
    with torch.no_grad():
        for name, value in values.items():
            known[name].copy_(value)


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Put the other module's parameters and buffers into ``module`` where names are equal.

    Raises:
        ConfigError: One has another shape or dtype, or one is a parameter and the other a buffer;
            nothing is shared then.
    """
    own, given = _tensors_of(module), _tensors_of(other)
    _check_shapes(given, own)
    for name in own.keys() & given:
        expected, found = (
            (type(each[name]).__name__, str(each[name].dtype)) for each in (own, given)
        )
        if found != expected:
            raise ConfigError(
                f"`{name}` must be a {' of '.join(expected)}, but is a {' of '.join(found)} in the "
                "group that shares it."
            )
    for name in own.keys() & given:
        path, _, key = name.rpartition(".")
        # Not `register_parameter()`: recurrent layers keep a second list of their weights.
        setattr(module.get_submodule(path), key, given[name])


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _check_shapes(given: Mapping[str, Any], known: Mapping[str, Tensor]) -> None:
    for name, tensor in known.items():
        expected = tuple(tensor.shape)
        value = given.get(name, tensor)
        check_argument(hasattr(value, "shape"), name, "be a tensor or an array", value)
        found = tuple(value.shape)
        if found != expected:
            raise ConfigError(f"`{name}` must have shape {expected}, but has {found}.")
