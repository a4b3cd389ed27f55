"""The arguments of one call as one nested value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from phalanx.types import Nested

__all__ = ["Call", "CallPart"]


class Call:
    """Positions by number and keywords by name: ``f(x, mask=m)`` is ``{"0": x, "mask": m}``."""

    # Any: the user's own arguments.
    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.num_args = len(args)
        self.leaves: Nested = {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}

    @staticmethod
    def with_inputs(inputs: Nested) -> Call:
        """Read a tuple as positions, a dict as keywords, anything else as the one argument."""
        if isinstance(inputs, dict):
            return Call((), inputs)
        return Call(inputs if type(inputs) is tuple else (inputs,), {})

    def split(self, leaves: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments again."""
        return _split(leaves, self.num_args)


@dataclass(frozen=True)
class CallPart:
    """Run a module on one worker's part of a call; an object, so that it can go to a process.

    Attributes:
        num_args: By worker, how many of its leaves are positions.
    """

    num_args: tuple[int, ...]

    def __call__(self, worker: int, module: nn.Module, leaves: Nested) -> Nested:
        """Return the module's outputs."""
        args, kwargs = _split(leaves, self.num_args[worker])
        return module(*args, **kwargs)


def _split(leaves: Mapping[str, Any], num_args: int) -> tuple[list[Any], dict[str, Any]]:
    values = list(leaves.values())
    return values[:num_args], dict(list(leaves.items())[num_args:])
