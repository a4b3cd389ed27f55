"""Parameters and buffers by name: their gradients, copied out, copied in, and shared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError

__all__ = ["GradientRequests", "copy_into", "copy_out", "share_tensors"]

_REQUESTS = ("write", "add", "null")


class GradientRequests:
    """One request for each parameter: whether it gets a gradient, and whether this is added.

    Args:
        module: Whose parameters.
        request: "write", "add" or "null" for all, or these by name or shell pattern: a name counts
            before patterns, and the first pattern that matches; "write" for the rest.
        fixed: Names or patterns of parameters that get "null".

    Raises:
        ConfigError: A request is unknown, or a name fits no parameter.
    """

    def __init__(
        self, module: nn.Module, request: str | Mapping[str, str], fixed: Sequence[str]
    ) -> None:
        rules = dict(request) if isinstance(request, Mapping) else {"*": request}
        for pattern, word in rules.items():
            if word not in _REQUESTS:
                raise ConfigError(
                    f"`grad_req` must be 'write', 'add' or 'null', but is {word!r} for {pattern!r}."
                )
        names = [name for name, _ in module.named_parameters()]
        for noun, patterns in (("grad_req", list(rules)), ("fixed_param_names", list(fixed))):
            for pattern in patterns:
                if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"`{noun}` must name parameters of the module, but {pattern!r} fits none. "
                        f"It has {', '.join(names) or 'none'}."
                    )
        self._module = module
        self._request_by_name = {
            name: "null" if _first(name, fixed) is not None else _request_of(name, rules)
            for name in names
        }

    @contextlib.contextmanager
    def without_null(self) -> Iterator[None]:
        """Let parameters of "null" need no gradient in the body, which is a forward pass."""
        frozen = [each for each in self._parameters_of("null") if each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def write(self, compute: Callable[[], object]) -> None:
        """Forget gradients of "write" and ``compute`` new ones; the old are back if that fails.

        A function, and no context: Ctrl-C between a context's begin and its body would lose them.
        """
        written = self._parameters_of("write")
        before = [parameter.grad for parameter in written]
        try:
            for parameter in written:
                parameter.grad = None
            compute()
        except BaseException:
            for parameter, gradient in zip(written, before, strict=True):
                parameter.grad = gradient
            raise

    def _parameters_of(self, request: str) -> list[nn.Parameter]:
        return [
            parameter
            for name, parameter in self._module.named_parameters()
            if self._request_by_name.get(name) == request
        ]


def _request_of(name: str, rules: Mapping[str, str]) -> str:
    pattern = name if name in rules else _first(name, list(rules))
    return "write" if pattern is None else rules[pattern]


def _first(name: str, patterns: Sequence[str]) -> str | None:
    return next((each for each in patterns if fnmatchcase(name, each)), None)


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
