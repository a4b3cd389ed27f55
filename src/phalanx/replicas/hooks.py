"""Hooks that users register on the modules of a model, which replicas run too.

A replica shares the very dictionaries in which torch keeps a module's hooks, so that a hook
registered or removed later is registered or removed there as well. Only a hook that is bound to a
module of the model itself (its own method) must be bound to the replica's; the dictionaries that
hold such hooks are the replica's own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.errors import UnsupportedError

__all__ = [
    "HOOKS_OF_STATE",
    "Hooks",
    "kept_outside",
    "shared_hooks",
    "warn_of_kept_tensors",
    "went_back_outside",
]

_WENT_BACK_TWICE = "backward through the graph a second time"  # torch's own words
_WAY_OUT = (
    "Let `forward()` return what the loss needs, or compute the loss in `forward=`, from the "
    "module that it is given."
)

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_KINDS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
HOOKS_OF_STATE = (  # never run in a replica, and may hold what cannot be copied
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def shared_hooks(source: nn.Module) -> dict[int, object]:
    """Return a memo for `copy.deepcopy` by which the copy shares the hooks of ``source``."""
    stored = [
        module.__dict__.get(kind, {}) for module in source.modules() for kind in HOOKS_OF_STATE
    ]
    return {id(hooks): hooks for hooks in [*_dicts(source), *stored]}


class Hooks:
    """The hooks of ``source`` in its copy ``replica``, which was made with :func:`shared_hooks`."""

    def __init__(self, source: nn.Module, replica: nn.Module) -> None:
        self._source = source
        self._inside = {id(module) for module in source.modules()}
        self._bound = [
            (hooks, tuple(hooks)) for hooks in _dicts(source) if _any_bound(hooks, self._inside)
        ]
        self._num_registered = RemovableHandle.next_id
        self._rebind(replica)

    def _rebind(self, replica: nn.Module) -> None:
        own = dict(zip(map(id, self._source.modules()), replica.modules(), strict=True))
        for module in replica.modules() if self._bound else ():
            for kind in _KINDS:
                hooks = module.__dict__[kind]
                if _any_bound(hooks, self._inside):
                    bound = ((key, _bind(hook, own)) for key, hook in hooks.items())
                    module.__dict__[kind] = type(hooks)(bound)

    def can_follow(self) -> bool:
        """Tell whether the replica runs the hooks that the source has now."""
        if any(tuple(hooks) != keys for hooks, keys in self._bound):
            return False
        if self._num_registered == RemovableHandle.next_id:  # none anywhere since
            return True
        known = [id(hooks) for hooks, _ in self._bound]
        if any(
            _any_bound(hooks, self._inside)
            for hooks in _dicts(self._source)
            if id(hooks) not in known
        ):
            return False
        self._num_registered = RemovableHandle.next_id
        return True


# Any: hooks are whatever the user registers.
def _dicts(source: nn.Module) -> list[dict[int, Any]]:
    return [module.__dict__[kind] for module in source.modules() for kind in _KINDS]


def _any_bound(hooks: dict[int, Any], inside: Collection[int]) -> bool:
    return any(id(module) in inside for hook in hooks.values() for module in _modules_of(hook))


def _bind(hook: Any, own: dict[int, nn.Module]) -> Any:
    if isinstance(hook, functools.partial):
        args = [own.get(id(arg), arg) for arg in hook.args]
        words = {word: own.get(id(value), value) for word, value in hook.keywords.items()}
        return functools.partial(_bind(hook.func, own), *args, **words)
    if isinstance(hook, MethodType) and id(hook.__self__) in own:
        return MethodType(hook.__func__, own[id(hook.__self__)])
    return hook


def _modules_of(hook: Any) -> list[object]:
    """Return what ``hook`` is bound to, as a method or by `functools.partial`."""
    if isinstance(hook, functools.partial):
        return [*_modules_of(hook.func), *hook.args, *hook.keywords.values()]
    return [hook.__self__] if isinstance(hook, MethodType) else []


def warn_of_kept_tensors(source: nn.Module) -> None:
    """Warn of forward hooks whose closures hold a dict or a list of the model's with tensors in it.

    In a replica such a hook writes to the model's own, and `forward()` reads a copy: with the
    tensors that a run before has left there, and no error.
    """
    kept: dict[int, str] = {}  # names, by the id of the module or of what it keeps them in
    if not any(map(_forward_hooks, source.modules())):
        return
    for place, module in source.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and _holds_tensors(value):
                kept[id(value)] = kept[id(module)] = f"{place}.{name}".lstrip(".")
    for module in source.modules() if kept else ():
        for hook in _forward_hooks(module):
            for name in {kept[id(each)] for each in _closed_over(hook) if id(each) in kept}:
                warnings.warn(
                    f"Forward hook `{hook.__qualname__}` must write to the module that it is given "
                    f"to be run in replicas, but holds `{name}` in its closure: each replica reads "
                    f"a copy, with the tensors that lie there now. {_WAY_OUT}",
                    stacklevel=2,
                )


def _forward_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _holds_tensors(value: object) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    values = value.values() if isinstance(value, dict) else value
    return any(isinstance(each, Tensor) for each in values)


def _closed_over(hook: object) -> Iterator[object]:
    for cell in (hook.__closure__ or ()) if isinstance(hook, FunctionType) else ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def kept_outside(error: Exception, module: nn.Module) -> UnsupportedError | None:
    """Return the error for features that a hook keeps outside of the replica, if it may be that."""
    told = isinstance(error, KeyError) or _WENT_BACK_TWICE in str(error)
    if not told or not any(each._forward_hooks for each in module.modules()):
        return None
    return UnsupportedError(
        f"{type(error).__name__} was raised in a replica of a module that has forward hooks: "
        f"{error}. If a hook keeps features in a dict or a list, that is one for all replicas, and "
        f"the module that it is called with is the replica. {_WAY_OUT}"
    )


def went_back_outside() -> UnsupportedError:
    """Return the error for gradients that a replica has got outside of its own backward pass."""
    return UnsupportedError(
        "A backward pass from outside of a replica has reached its parameters: a tensor of its "
        "graph was kept, by a hook or in an attribute, and used in another loss. Its gradients "
        f"are dropped. {_WAY_OUT}"
    )
