"""The lead with which a worker may read: a pure decision over all workers' clocks.

clock      0 1 2 3 4 5            bound 2: a worker at 5 reads when all are at 3 or more
fastest    ─ ─ ─ ─ ─ ●
slowest    ─ ─ ● ← waits for this one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.errors import ConfigError


class Behind(NamedTuple):
    """The worker that others wait for, and the clock that it must reach."""

    worker: int
    clock: int


@dataclass(frozen=True)
class Staleness:
    """The number of rounds that a worker may be ahead of the slowest.

    Args:
        bound: 0 for bulk-synchronous, k for bounded, None for asynchronous.

    Raises:
        ConfigError: The bound is negative or no integer.

    Example:
        >>> Staleness(2).waits_for(0, {0: 5, 1: 2, 2: 4})
        Behind(worker=1, clock=3)
        >>> Staleness(None).waits_for(0, {0: 5, 1: 0}) is None
        True

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

    def waits_for(
        self, worker: int, clock_by_worker: Mapping[int, int], *, ahead: int = 0
    ) -> Behind | None:
        """Return the slowest of the others if ``worker`` must wait for it, else None.

        Args:
            worker: If its own clock is not in the mapping (it has left), it does not wait.
            clock_by_worker: Finished rounds of every worker who still counts.
            ahead: Rounds beyond the bound: 1 to begin a round, as the bound is on what is read, and
                a round begins with adds.
        """
        others = [(clock, other) for other, clock in clock_by_worker.items() if other != worker]
        if self.bound is None or not others or worker not in clock_by_worker:
            return None
        clock, slowest = min(others)
        needed = clock_by_worker[worker] - self.bound - ahead
        return Behind(slowest, needed) if clock < needed else None
