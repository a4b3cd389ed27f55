"""How far ahead of the others a worker may read: a pure decision over everybody's clock.

clock      0 1 2 3 4 5            bound 2: whoever is at 5 reads only when nobody is below 3
fastest    ─ ─ ─ ─ ─ ●
slowest    ─ ─ ● ← waits for this one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.errors import ConfigError


class Verdict(NamedTuple):
    """Whether a worker may go on, and if not, for whom it waits.

    Attributes:
        may_go_on: Whether it need not wait.
        slowest: The worker with the lowest clock, the lowest number among equals; None if alone.
        needed_clock: The clock that everybody must have reached.
    """

    may_go_on: bool
    slowest: int | None
    needed_clock: int


@dataclass(frozen=True)
class Staleness:
    """How many rounds a worker may be ahead of the slowest.

    Args:
        bound: 0 for bulk-synchronous, k for bounded, None for asynchronous.

    Raises:
        ConfigError: The bound is negative or no integer.

    Example:
        >>> Staleness(2).may_read(worker=0, clock_by_worker={0: 5, 1: 2, 2: 4})
        Verdict(may_go_on=False, slowest=1, needed_clock=3)
        >>> Staleness(None).may_read(worker=0, clock_by_worker={0: 5, 1: 0}).may_go_on
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
        """Whether all workers go through the same rounds together."""
        return self.bound == 0

    @property
    def is_bounded(self) -> bool:
        """Whether clocks are compared at all, beyond bulk-synchronous rounds."""
        return self.bound is not None and self.bound > 0

    @property
    def as_argument(self) -> str | None:
        """How a caller asks for it: ``sync=True``, ``staleness=k``, or None if asynchronous."""
        if self.is_bulk_synchronous:
            return "sync=True"
        return None if self.bound is None else f"staleness={self.bound}"

    def may_read(self, *, worker: int, clock_by_worker: Mapping[int, int]) -> Verdict:
        """Tell whether ``worker`` may read now: nobody is more than the bound behind it.

        Args:
            worker: Who asks. If its own clock is not in the mapping (it has left), it may continue.
            clock_by_worker: Finished rounds of every worker who still counts.
        """
        return self._judge(worker, clock_by_worker, self.bound)

    def may_begin_round(self, *, worker: int, clock_by_worker: Mapping[int, int]) -> Verdict:
        """Tell whether ``worker``, whose clock has just advanced, may begin the next round.

        One more than for a read: the bound is on what is read, and a round begins with adds.
        """
        return self._judge(worker, clock_by_worker, None if self.bound is None else self.bound + 1)

    def _judge(self, worker: int, clock_by_worker: Mapping[int, int], bound: int | None) -> Verdict:
        others = [(clock, other) for other, clock in clock_by_worker.items() if other != worker]
        if bound is None or not others or worker not in clock_by_worker:
            return Verdict(True, None, 0)
        clock, slowest = min(others)
        needed = clock_by_worker[worker] - bound
        return Verdict(clock >= needed, slowest, needed)
