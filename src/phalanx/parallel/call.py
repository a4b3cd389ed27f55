"""The arguments of one call as one nested value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from phalanx.errors import ConfigError
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
        if isinstance(inputs, Mapping):
            return Call((), inputs)
        return Call(inputs if type(inputs) is tuple else (inputs,), {})

    def inputs(self) -> Nested:
        """Return what :meth:`with_inputs` makes this call of.

        Raises:
            ConfigError: There are positions and keywords.
        """
        args, kwargs = self.split(self.leaves)
        if args and kwargs:
            raise ConfigError(
                "A call whose batch is split by `Layout(split=...)` must have positions or "
                f"keywords, but has {len(args)} of the former and {', '.join(kwargs)}. Give all "
                "by name."
            )
        return kwargs if kwargs else args[0] if len(args) == 1 else tuple(args)

    def like(self, inputs: Nested) -> Call:
        """Read ``inputs`` as :meth:`with_inputs`, for a call of the same form.

        Raises:
            ConfigError: It has another number of positions.
        """
        found = Call.with_inputs(inputs)
        if found.num_args != self.num_args:
            raise ConfigError(
                "`collate` must return what `split` was given (one argument, a tuple of "
                f"{self.num_args}, or a dict of keywords), but makes {found.num_args} positions."
            )
        return found

    def split(self, leaves: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments again."""
        values = list(leaves.values())
        return values[: self.num_args], dict(list(leaves.items())[self.num_args :])

    def run(self, module: nn.Module, leaves: Mapping[str, Any]) -> Nested:
        """Call ``module`` with ``leaves`` in the place of this call's own."""
        args, kwargs = self.split(leaves)
        return module(*args, **kwargs)
