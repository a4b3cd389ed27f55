"""Parameters and buffers by name: copied out, copied in, and shared."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError

__all__ = ["copy_into", "copy_out", "share_tensors"]


# Any, here and below: tensors or arrays.
def copy_out(known: Mapping[str, Tensor], into: MutableMapping[str, Any]) -> None:
    """Copy every tensor into that of its name, or add a copy; other names are left alone.

    Raises:
        ConfigError: One has another shape; nothing is written then.
    """
    targets = {name: into[name] for name in known if name in into}
    _check_shapes(targets, known)
    for name, tensor in known.items():
        target, own = targets.get(name), tensor.detach()
        if target is None:
            into[name] = own.clone()
        elif isinstance(target, Tensor):
            target.copy_(own)
        else:
            target[...] = own.cpu().numpy()


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
    missing = [name for name in known if name not in given]
    extra = [name for name in given if name not in known]
    for names, allowed, told in (
        (missing, allow_missing, "missing"),
        (extra, allow_extra, "extra"),
    ):
        if names and not allowed:
            raise ConfigError(
                "`arg_params` and `aux_params` must hold the module's names, but "
                f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'} {told}. Give "
                f"allow_{told}=True to let it be."
            )
    tensors = {name: torch.as_tensor(given[name]) for name in known if name in given}
    _check_shapes(tensors, known)
    # All are read before one is written: they may lie in one memory.
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, tensor in copies.items():
            known[name].copy_(tensor)


def _check_shapes(given: Mapping[str, Any], known: Mapping[str, Tensor]) -> None:
    for name, value in given.items():
        if tuple(value.shape) != tuple(known[name].shape):
            raise ConfigError(
                f"`{name}` must have shape {tuple(known[name].shape)}, but has "
                f"{tuple(value.shape)}."
            )


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Put the other module's parameters and buffers into ``module`` where it has the same names.

    Raises:
        ConfigError: One has another shape, dtype or device; nothing is shared then.
    """
    theirs: dict[str, Tensor] = dict(other.named_parameters(remove_duplicate=False))
    theirs.update(other.named_buffers(remove_duplicate=False))
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    for name, tensor in own.items():
        found = theirs.get(name, tensor)
        if _kind(found) != _kind(tensor):
            raise ConfigError(
                f"`shared_group` must have `{name}` as the module has it, {_kind(tensor)}, but has "
                f"it as {_kind(found)}."
            )
    for name in own:
        if name in theirs:
            path, _, key = name.rpartition(".")
            # Not by `_parameters`: recurrent layers keep a second list of their weights.
            setattr(module.get_submodule(path), key, theirs[name])


def _kind(tensor: Tensor) -> tuple[type, tuple[int, ...], torch.dtype, torch.device]:
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.device
