"""Parameters and buffers by name: read out, written in, shared with another module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.executor_group.given_tensors import check_dense, read_tensor
from phalanx.executor_group.group_arguments import check_mapping
from phalanx.memory import is_expanded

__all__ = ["read_tensors", "share_tensors", "write_params"]


def read_tensors(*pairs: tuple[Iterable[tuple[str, Tensor]], MutableMapping[str, Tensor]]) -> None:
    """Copy every tensor (the first of a pair) into that of its name (the second), or add a copy.

    Raises:
        ConfigError: What is written to has another shape, is expanded, or is an array that can only
            be read; nothing is written then.
    """
    checked = []
    for known, into in pairs:
        tensors = dict(known)
        targets = {name: _target(name, into[name]) for name in tensors if name in into}
        _check(targets, tensors)
        checked.append((tensors, targets, into))
    with torch.no_grad():
        for tensors, targets, into in checked:
            for name, tensor in tensors.items():
                if name in targets:
                    targets[name].copy_(tensor)
                else:
                    into[name] = tensor.detach().clone()


# Any: tensors or arrays, or what is refused.
def write_params(
    module: nn.Module,
    arg_params: Mapping[str, Any],
    aux_params: Mapping[str, Any] | None,
    *,
    allow_extra: bool,
    allow_missing: bool,
) -> None:
    """Copy parameters, and buffers if given, tensors or arrays, into those of ``module``.

    Raises:
        ConfigError: As for :func:`_checked`; nothing is written then.
    """
    check_mapping("arg_params", arg_params, "tensors")
    known: dict[str, Tensor] = dict(module.named_parameters())
    given = dict(arg_params)
    if aux_params is not None:
        check_mapping("aux_params", aux_params, "tensors")
        known.update(module.named_buffers())
        given.update(aux_params)
    given = {
        name: read_tensor(name, value) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }
    targets = _checked(known.items(), given, allow_extra=allow_extra, allow_missing=allow_missing)
    _copy(given, targets)


def _checked(
    known: Iterable[tuple[str, Tensor]],
    given: Mapping[str, Tensor],
    *,
    allow_extra: bool,
    allow_missing: bool,
) -> dict[str, Tensor]:
    """Return what is to be copied into, by name, after all checks.

    Raises:
        ConfigError: Names are missing or extra and that is not allowed; a shape differs.
    """
    tensors = dict(known)
    missing = [name for name in tensors if name not in given]
    extra = [name for name in given if name not in tensors]
    for names, allowed, told, option in (
        (missing, allow_missing, "hold all of the module's names", "allow_missing"),
        (extra, allow_extra, "hold no other names than the module's", "allow_extra"),
    ):
        if names and not allowed:
            raise ConfigError(
                f"`arg_params` and `aux_params` must {told}, but {', '.join(map(repr, names))} "
                f"{'is' if len(names) == 1 else 'are'} "
                f"{'missing' if names is missing else 'extra'}. Give {option}=True to let it be."
            )
    _check({name: value for name, value in given.items() if name in tensors}, tensors)
    return {name: tensors[name] for name in given if name in tensors}


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Put the other module's parameters and buffers into ``module`` where it has the same names.

    Raises:
        ConfigError: One has another shape, dtype or device; nothing is shared then.
    """
    theirs: dict[str, Tensor] = dict(other.named_parameters(remove_duplicate=False))
    theirs.update(other.named_buffers(remove_duplicate=False))
    places: list[tuple[nn.Module, str, Tensor]] = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for own in (owner._parameters, owner._buffers):
            for key, tensor in own.items():
                name = f"{prefix}.{key}" if prefix else key
                found = theirs.get(name)
                if tensor is None or found is None:
                    continue
                mine = (tuple(tensor.shape), tensor.dtype, tensor.device)
                if mine != (tuple(found.shape), found.dtype, found.device) or isinstance(
                    tensor, nn.Parameter
                ) != isinstance(found, nn.Parameter):
                    raise ConfigError(
                        f"`shared_group` must have `{name}` as the module has it, {mine}, but has "
                        f"it as {(tuple(found.shape), found.dtype, found.device)}."
                    )
                places.append((owner, key, found))
    for owner, key, found in places:
        setattr(owner, key, found)  # recurrent layers keep a second list of their weights


def _copy(given: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy each of ``given`` into that of its name, as if all were read before one is written."""
    written = {_memory(target) for target in targets.values()}
    with torch.no_grad():
        read = {
            name: given[name].clone() if _memory(given[name]) in written else given[name]
            for name in targets
        }
        for name, target in targets.items():
            target.copy_(read[name])


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


# Any: whatever the user gave.
def _target(name: str, given: Any) -> Any:
    """Return what is copied into: a tensor, or the memory of an array, with each element apart."""
    if isinstance(given, np.ndarray):
        if not given.flags.writeable:
            raise ConfigError(
                f"`{name}` must be an array that can be written to, but is read-only. Give "
                f"{name}.copy()."
            )
        return torch.from_numpy(given)
    if isinstance(given, Tensor) and is_expanded(given):
        raise ConfigError(
            f"`{name}` must have memory for each element to be copied into, but is expanded. Give "
            f"{name}.clone()."
        )
    return given


# Any: whatever the user gave.
def _check(given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.shape != tensors[name].shape:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"`{name}` must have shape {tuple(tensors[name].shape)}, but has {shown}."
            )
        check_dense(name, value)
        if value.is_complex() != tensors[name].is_complex():
            kind = "complex" if tensors[name].is_complex() else "real"
            raise ConfigError(f"`{name}` must be {kind} as in the module, but is {value.dtype}.")
