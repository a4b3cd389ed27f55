"""The seconds that a replica works."""

from __future__ import annotations

import itertools

import torch

from phalanx.clock import now_s

__all__ = ["Stopwatch"]


class Stopwatch:
    """Measure in a replica's thread; it runs from its construction on.

    Args:
        device: The replica's.
        waits: Wait for an accelerator at the end of a lap: the thread that gives it work is done
            sooner.

    Example:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> watch.lap(), watch.lap()
        (None, None)
        >>> [seconds >= 0 for seconds in watch.laps_s()]
        [True, True]
    """

    def __init__(self, device: torch.device, *, waits: bool = False) -> None:
        self._device = device
        self._waits = waits and device.type not in ("cpu", "meta")
        self._moments_s: list[float] = []
        self.lap()

    def lap(self) -> None:
        """End a lap, and begin the next one."""
        if self._waits:
            torch.accelerator.synchronize(self._device)
        self._moments_s.append(now_s())

    def laps_s(self) -> list[float]:
        """Return the seconds of work of all laps so far."""
        return [max(0.0, end_s - begin_s) for begin_s, end_s in itertools.pairwise(self._moments_s)]
