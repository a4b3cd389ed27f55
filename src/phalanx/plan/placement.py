"""The device of a new module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from phalanx.errors import ConfigError

D = TypeVar("D")


def least_loaded(candidates: Sequence[D], placed: Sequence[tuple[D, int]]) -> D:
    """Return the candidate that holds fewest bytes.

    Among equals the one with fewer modules, then the earlier candidate, so that modules without
    parameters are dealt out in turn.

    Args:
        candidates: Where a module may go.
        placed: (place, bytes) of every module that has one already, wherever that is.

    Example:
        >>> least_loaded(["a", "b"], [("a", 400), ("b", 100), ("b", 100)])
        'b'
        >>> least_loaded(["a", "b"], [("a", 0)])
        'b'

    Raises:
        ConfigError: There is no candidate.

    Source: fbcunn's ``nextGPU()``, which counted modules only, and not those placed by hand.
    """
    if not candidates:
        raise ConfigError("`candidates` must hold at least one device, but is empty.")

    def load(place: D) -> tuple[int, int]:
        sizes = [size for where, size in placed if where == place]
        return sum(sizes), len(sizes)

    return min(candidates, key=load)
