"""What a replica itself takes for its work, without what it waits for others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.clock import now_s

__all__ = ["Stopwatch"]


class Stopwatch:
    """Measure in a replica's thread; it runs from its construction on.

    Args:
        device: The replica's.
        waited_s: Seconds that the replica has waited for others so far; default: it never waits.
        settles: Let the device finish what it was given before the time is read. Only so a device
            that works behind the thread's back is measured; the next work is given to it later.

    Example:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> watch.lap() >= 0
        True
    """

    def __init__(
        self,
        device: torch.device,
        *,
        waited_s: Callable[[], float] | None = None,
        settles: bool = False,
    ) -> None:
        self._device = device
        self._waited_s = waited_s
        self._settles = settles and device.type not in ("cpu", "meta")
        self._read = now_s if waited_s is None and not self._settles else self._read_own
        self._begin_s = self._read()

    def lap(self) -> float:
        """Return the seconds of work since the last lap, and begin the next one."""
        begin_s, self._begin_s = self._begin_s, self._read()
        return self._begin_s - begin_s

    def _read_own(self) -> float:
        if self._settles:
            torch.accelerator.current_stream(self._device).synchronize()
        return now_s() if self._waited_s is None else now_s() - self._waited_s()
