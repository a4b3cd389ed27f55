"""The arguments of one call as one nested value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.types import Nested

__all__ = ["Call"]


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
        values = list(leaves.values())
        return values[: self.num_args], dict(list(leaves.items())[self.num_args :])
