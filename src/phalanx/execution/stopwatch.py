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
        on_device: Measure an accelerator by events on its current stream: the thread that gives it
            work is done sooner. Otherwise by the thread's clock.

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
        on_device: bool = False,
    ) -> None:
        self._device = device
        self._on_device = on_device and device.type not in ("cpu", "meta")
        self._waited_s = waited_s
        self._moments: list[tuple[float | torch.Event, float]] = []
        self.lap()

    def lap(self) -> None:
        """End a lap, and begin the next one."""
        waited_s = 0.0 if self._waited_s is None else self._waited_s()
        self._moments.append((self._event() if self._on_device else now_s(), waited_s))

    def laps_s(self) -> list[float]:
        """Return the seconds of work of all laps so far.

        Blocks: until the device has done the last one.
        """
        last, _ = self._moments[-1]
        if isinstance(last, torch.Event):
            last.synchronize()
        return [
            max(0.0, _seconds(begin, end) - (waited_s - waited_before_s))
            for (begin, waited_before_s), (end, waited_s) in itertools.pairwise(self._moments)
        ]

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def _seconds(begin: float | torch.Event, end: float | torch.Event) -> float:
    if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
        return begin.elapsed_time(end) / 1000
    assert not isinstance(begin, torch.Event)
    assert not isinstance(end, torch.Event)
    return end - begin
