"""Workloads that follow what a container's workers take, whichever thread tells it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from phalanx.plan import Balancer, Decision

__all__ = ["Balancing"]


class Balancing:
    """A balancer that may be asked and told by several threads: two may call one container.

    Args:
        num_workers: How many share a batch.
    """

    def __init__(self, num_workers: int) -> None:
        self._balancer = Balancer(num_workers)
        self._lock = threading.Lock()

    @property
    def workloads(self) -> tuple[float, ...]:
        """Each worker's share of the next batch."""
        return self._balancer.workloads

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was decided after each batch, and why; the last 10,000 are kept."""
        with self._lock:
            return self._balancer.trace

    def observer(self, sizes: Sequence[int]) -> Callable[[Sequence[float]], None]:
        """Return what takes in the seconds of a batch that was cut into ``sizes``."""

        def observe(seconds: Sequence[float]) -> None:
            with self._lock:
                self._balancer.observe(sizes, seconds)

        return observe
