"""A shell: a shallow copy of a module, which one replica runs.

    module   attributes, hooks, objects ◄── shared ── shell
             parameters ◄── the same memory ───────── leaves of its own, each with its own `grad`
             buffers                                  the replica's own copies (see buffers.py)
             children                                 shells of them

`torch.nn.DataParallel` makes its replicas in the same way. Where an attribute of the module is a
part of the module, or a list, tuple or dict with a part in it (a child, a weight, a method), the
shell has its own part, and a list, tuple or dict of its own around it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.torch_internals import make_subclass
from phalanx.warning import warn_user

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules")
_FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")  # torch's lists in recurrent layers
_SHARED = _OF_EVERY_MODULE | {*_FLAT_WEIGHTS}  # with the tables, which are made before


class OwnInShell:
    """An attribute of which each shell has its own, such as the threads of a container."""

    def renewed(self) -> OwnInShell:
        """Return the attribute of a new shell."""
        raise NotImplementedError


@dataclass(frozen=True)
class _ShellPart:
    """One module and its shell.

    Attributes:
        made: The attributes that the shell was given.
    """

    path: str
    source: nn.Module
    own: nn.Module
    made: dict[str, Any]  # Any: attributes of the user's module


class Shell:
    """A shallow copy of ``source`` and of all modules in it.

    Args:
        leaves: By the id of each parameter, the tensor that takes its place.

    Attributes:
        module: The copy. Its buffers are those of ``source`` until they are replaced.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2))
        >>> own = Shell(net, {id(p): alias_of(p, p) for p in net.parameters()}).module
        >>> own[0].weight is net[0].weight, own[0].weight.data_ptr() == net[0].weight.data_ptr()
        (False, True)
    """

    def __init__(self, source: nn.Module, leaves: Mapping[int, Tensor]) -> None:
        self._parts = [
            _ShellPart(path, each, object.__new__(type(each)), {})
            for path, each in source.named_modules()
        ]
        self._own_by_id: dict[int, Any] = {id(part.source): part.own for part in self._parts}
        self.module: nn.Module = self._own_by_id[id(source)]
        self._own_by_id.update(leaves)
        for part in self._parts:
            self._fill(part)
        for part in self._parts:
            _complete(part.own)
            part.made.update(vars(part.own))

    def assigned(self) -> list[str]:
        """Return the names of the attributes that were assigned since the shell was made."""
        found = []
        for part in self._parts:
            now, made = vars(part.own), part.made
            names = [
                name
                for name, value in now.items()
                if value is not made.get(name, now) and not _is_expected(part.source, name)
            ]
            for table in _TABLES:
                before = vars(part.source)[table]
                names += [
                    name
                    for name, value in now[table].items()
                    if value is not None and before.get(name) is None
                ]
            found += [f"{part.path}.{name}".lstrip(".") for name in names]
        return found

    def _fill(self, part: _ShellPart) -> None:
        theirs, own = vars(part.source), vars(part.own)
        own.update(theirs)
        for table in _TABLES:
            own[table] = {key: self._own_by_id.get(id(v), v) for key, v in theirs[table].items()}
        for name in theirs.keys() - _SHARED:
            own[name] = self._own(theirs[name])

    # Any: an attribute of the user's module.
    def _own(self, value: Any) -> Any:
        """Return the shell's counterpart of ``value``."""
        if id(value) in self._own_by_id:
            return self._own_by_id[id(value)]
        if isinstance(value, (list, tuple, dict)):
            return self._with_own_parts(value)
        if isinstance(value, MethodType) and id(value.__self__) in self._own_by_id:
            return MethodType(value.__func__, self._own_by_id[id(value.__self__)])
        return value.renewed() if isinstance(value, OwnInShell) else value

    # Any: a list, tuple or dict of the user's module.
    def _with_own_parts(self, value: Any) -> Any:
        """Return ``value`` itself where no part of the module is in it."""
        held = value.values() if isinstance(value, dict) else value
        if self._own_by_id.keys().isdisjoint(map(id, held)):
            return value
        if type(value) is tuple:
            return tuple([self._own_by_id.get(id(each), each) for each in value])
        own = copy.copy(value)
        if isinstance(own, list):
            own[:] = [self._own_by_id.get(id(each), each) for each in value]
        elif isinstance(own, dict):
            own.update((key, self._own_by_id.get(id(each), each)) for key, each in value.items())
        return own


def warn_of_assigned(names: Sequence[str]) -> None:
    """Warn of attributes that `forward` assigns to the shells of a first run."""
    if names:
        told = ", ".join(f"`self.{name}`" for name in names[:5]) + (", …" if names[5:] else "")
        warn_user(
            f"forward() assigns {told}; replicas do not keep it. Register a buffer, or return it.",
        )


def _complete(own: nn.Module) -> None:
    """Make what torch keeps in addition to a module's tables: lists of weights, bound methods."""
    attributes = vars(own)
    if isinstance(own, nn.RNNBase):
        names = own._flat_weights_names
        flat = [own._parameters.get(*each) for each in zip(names, own._flat_weights, strict=True)]
        attributes["_flat_weights"] = flat
        attributes["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in flat]
        attributes["flatten_parameters"] = _stay
    if attributes.get("dynamo_ctx") is not None:  # made by `torch.compile`: its `forward` is bound
        own._initialize()  # type: ignore[operator]


def _stay() -> None:
    """Leave weights where they are: in cuDNN's layout they would leave the shared memory."""


def _is_expected(source: nn.Module, name: str) -> bool:
    """Tell whether `forward` may assign an attribute: it is computed again when it is needed."""
    return (
        name in _SHARED
        or isinstance(getattr(type(source), name, None), functools.cached_property)
        # From these, `torch.nn.utils.prune` and `weight_norm` compute the attribute in a hook.
        or not source._parameters.keys().isdisjoint((f"{name}_orig", f"{name}_g"))
    )


def alias_of(parameter: nn.Parameter, home: Tensor) -> Tensor:
    """Return a leaf like ``parameter`` in the memory of ``home``, and a separate `grad`.

    Both have one version counter, so that autograd notices writes to either.
    """
    with torch.inference_mode(home.is_inference()):  # it has no counter then
        alias: Tensor = make_subclass(type(parameter), home.detach(), parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias


def placed_on(module: nn.Module, device: torch.device) -> nn.Module:
    """Return ``module``, or a shell of it with copies of its tensors where they lie elsewhere.

    A module with parameters that are trained stays where it is.

    Example:
        >>> loss = nn.CrossEntropyLoss(weight=torch.ones(3))
        >>> placed_on(loss, torch.device("meta")).weight.device, loss.weight.device
        (device(type='meta'), device(type='cpu'))
    """
    tensors = [*module.parameters(), *module.buffers()]
    if all(each.device == device for each in tensors) or any(
        each.requires_grad for each in tensors
    ):
        return module
    leaves = {id(p): nn.Parameter(p.detach().to(device), False) for p in module.parameters()}
    own = Shell(module, leaves).module
    for each in own.modules():
        each._buffers = {k: None if b is None else b.to(device) for k, b in each._buffers.items()}
    return own
