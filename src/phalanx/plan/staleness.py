"""The lead with which a worker may read: a bound on the difference of clocks.

clock      0 1 2 3 4 5            bound 2: a worker at 5 reads when all are at 3 or more
fastest    ─ ─ ─ ─ ─ ●
slowest    ─ ─ ● ← waits for this one
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigError


@dataclass(frozen=True)
class Staleness:
    """The number of rounds that a worker may be ahead of the slowest.

    Args:
        bound: 0 for bulk-synchronous, k for bounded, None for asynchronous.

    Raises:
        ConfigError: The bound is negative or no integer.

    Example:
        >>> Staleness(2).as_argument, Staleness(0).is_bulk_synchronous
        ('staleness=2', True)

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NIPS 2013, §3; bound ``max_delay`` of the first Multiverso.
    """

    bound: int | None

    def __post_init__(self) -> None:
        if self.bound is not None and (type(self.bound) is not int or self.bound < 0):
            raise ConfigError(
                f"`staleness` must be a number of rounds from 0 on, or None, but is {self.bound!r}."
            )

    @property
    def is_bulk_synchronous(self) -> bool:
        """True if all workers go through the same rounds together."""
        return self.bound == 0

    @property
    def is_bounded(self) -> bool:
        """True if clocks are compared at all, beyond bulk-synchronous rounds."""
        return self.bound is not None and self.bound > 0

    @property
    def as_argument(self) -> str | None:
        """The argument for it: ``sync=True``, ``staleness=k``, or None if asynchronous."""
        if self.is_bulk_synchronous:
            return "sync=True"
        return None if self.bound is None else f"staleness={self.bound}"
