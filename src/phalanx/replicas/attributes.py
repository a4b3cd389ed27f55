"""Attributes that users change on the model while replicas of it exist, such as a dropout's `p`.

Plain values and tensors are taken over. Whatever else changes (a child replaced, a class, a
function, a list) needs new replicas. What is changed inside a list or another object is not seen.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.replicas.tensor_version import TensorVersion

__all__ = ["Attributes"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Attributes:
    """The attributes of all modules of ``source``, as ``replica`` has taken them over."""

    def __init__(self, source: nn.Module, replica: nn.Module) -> None:
        pairs = zip(source.modules(), replica.modules(), strict=True)
        self._members = [_Member(theirs, own) for theirs, own in pairs]

    def can_follow(self) -> bool:
        """Tell whether everything that has changed can be taken over."""
        return all(member.can_follow() for member in self._members)

    def refresh(self, device: torch.device) -> None:
        """Take over what has changed."""
        for member in self._members:
            if member.has_changed():
                member.refresh(device)


class _Member:
    """One module of the source, and its copy."""

    def __init__(self, source: nn.Module, own: nn.Module) -> None:
        self._source = source
        self._own = own
        self._note()
        self._kind = type(source)
        self._children = list(source._modules.values())
        self._parameters = _present(source._parameters)
        self._buffers = _present(source._buffers)
        everything = {**source._parameters, **source._buffers}
        self._empty = {name for name, tensor in everything.items() if tensor is None}

    def has_changed(self) -> bool:
        """Tell by identity: 1 and 1.0 are equal, and a model may tell them apart."""
        now, seen = self._source.__dict__, self._seen
        return (
            len(now) != len(seen)
            or not all(map(is_, now.values(), seen.values()))
            or (bool(self._tensors) and not self._tensors_are_still())
        )

    def _tensors_are_still(self) -> bool:
        now = self._source.__dict__
        return all(tensor.is_still(now[key]) for key, tensor in self._tensors.items())

    def can_follow(self) -> bool:
        source = self._source
        if (
            type(source) is not self._kind
            or list(source._modules.values()) != self._children
            or (
                (source._parameters or self._parameters)
                and _present(source._parameters) != self._parameters
            )
            or ((source._buffers or self._buffers) and _present(source._buffers) != self._buffers)
            or (
                self._empty
                and not self._empty <= source._parameters.keys() | source._buffers.keys()
            )
        ):
            return False
        return not self.has_changed() or all(_is_plain(value) for value in self._changes().values())

    def refresh(self, device: torch.device) -> None:
        for key, value in self.take_changes().items():
            self._own.__dict__[key] = value.to(device) if isinstance(value, Tensor) else value

    def take_changes(self) -> dict[str, Any]:
        changes = {key: value for key, value in self._changes().items() if _is_plain(value)}
        self._note()
        return changes

    def _note(self) -> None:
        """Remember what there is now; tensors with their versions, as they may be written to."""
        self._seen = dict(self._source.__dict__)
        self._tensors = {
            key: TensorVersion(value)
            for key, value in self._seen.items()
            if isinstance(value, Tensor)
        }

    # Any: attributes of the user's own modules.
    def _changes(self) -> dict[str, Any]:
        nothing = object()
        now = self._source.__dict__
        changed = {
            key: value
            for key, value in now.items()
            if value is not self._seen.get(key, nothing)
            or (key in self._tensors and not self._tensors[key].is_still(value))
        }
        removed = {key: nothing for key in self._seen if key not in now}
        return {**changed, **removed}


# Any: parameters or buffers by name.
def _present(tensors: dict[str, Any]) -> list[str]:
    """Return the names of those that are there; None holds the place of one that is not."""
    return [name for name, tensor in tensors.items() if tensor is not None]


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(_is_plain(each) for each in value)
    if isinstance(value, Tensor):  # one with a graph is refused when replicas are made anew
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    return isinstance(value, _PLAIN)
