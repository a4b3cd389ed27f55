"""Refuse a loss that keeps state in buffers of its own.

There is one loss for all threads and one in each worker process, so what it writes to itself would
depend on the number of replicas and on timing. A module's buffers are each microbatch's own, and
merged; there a loss may keep what it wants to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from phalanx.errors import UnsupportedError

__all__ = ["LossBuffers"]

_DEPTH = 4


class LossBuffers:
    """The buffers of modules that a loss is or uses, but for those of the trained module.

    Args:
        name: Of the argument, for errors.
        function: The loss, or what computes it.
        trained: The module whose replicas it is computed for.
    """

    def __init__(self, name: str, function: object, trained: nn.Module) -> None:
        self._name = name
        self._function = function
        self._trained = trained
        self._found: list[tuple[nn.Module, str]] | None = None

    @property
    def _places(self) -> list[tuple[nn.Module, str]]:
        if self._found is None:
            known = {id(each) for each in self._trained.modules()}
            self._found = [
                (owner, key)
                for module in dict.fromkeys(_modules_of(self._function, _DEPTH))
                for owner in module.modules()
                if id(owner) not in known
                for key in owner._buffers
            ]
        return self._found

    def note(self) -> list[tuple[Tensor | None, int]]:
        """Return the buffers as they are now."""
        if not (places := self._places):
            return []
        found = [owner._buffers[key] for owner, key in places]
        return [(b, -1 if b is None or b.is_inference() else b._version) for b in found]

    def check(self, before: list[tuple[Tensor | None, int]]) -> None:
        """Compare with what :meth:`note` returned.

        Raises:
            UnsupportedError: A buffer was written or replaced.
        """
        if not before:
            return
        for (owner, key), (was, then), (now, version) in zip(
            self._places, before, self.note(), strict=True
        ):
            if was is not now or then != version:
                raise UnsupportedError(
                    f"Buffer `{key}` of `{self._name}` (a {type(owner).__name__!r}) must stay as "
                    "it is, but was changed: all replicas share it. Make that module a part of the "
                    "trained module and compute the loss with `forward=`; buffers of the module "
                    "are merged."
                )


# Any: whatever the user's function holds.
def _modules_of(value: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that ``value`` is, is bound to, closes over, or names."""
    if isinstance(value, nn.Module):
        yield value
        return
    held: list[Any] = []
    if isinstance(value, partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        held = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        held = cells + [each for each in named if isinstance(each, nn.Module)]
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        held = list(vars(value).values())
    for each in held if depth else ():
        yield from _modules_of(each, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that was not assigned yet
        return False
