"""What a replica itself takes for its work, without what it waits for others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from phalanx.clock import now_s

__all__ = ["Stopwatch"]


class Stopwatch:
    """Measure in a replica's thread; it runs from its construction on.

    Args:
        device: The replica's.
        waited_s: Seconds that the replica has waited for others so far; default: it never waits.
        waits: Wait for an accelerator at the end of a lap: the thread that gives it work is done
            sooner.

    Example:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> watch.lap(), watch.lap()
        (None, None)
        >>> [seconds >= 0 for seconds in watch.laps_s()]
        [True, True]
    """

    def __init__(
        self,
        device: torch.device,
        *,
        waited_s: Callable[[], float] | None = None,
        waits: bool = False,
    ) -> None:
        self._device = device
        self._waits = waits and device.type not in ("cpu", "meta")
        self._waited_s = waited_s
        self._moments: list[tuple[float, float]] = []
        self.lap()

    def lap(self) -> None:
        """End a lap, and begin the next one."""
        waited_s = 0.0 if self._waited_s is None else self._waited_s()
        if self._waits:
            torch.accelerator.synchronize(self._device)
        self._moments.append((now_s(), waited_s))

    def laps_s(self) -> list[float]:
        """Return the seconds of work of all laps so far."""
        return [
            max(0.0, end_s - begin_s - (waited_s - waited_before_s))
            for (begin_s, waited_before_s), (end_s, waited_s) in itertools.pairwise(self._moments)
        ]
