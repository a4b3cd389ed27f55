"""Whether other work wants this core: then who looks for others uses up the turn that it needs."""

from __future__ import annotations

import resource
import threading

from phalanx.clock import now_s

__all__ = ["Turns"]

_LATELY_S = 0.02  # some turns of a scheduler; a quiet machine takes a core away more seldom


class Turns:
    """How often the kernel has taken the core from the thread that asks.

    It does so where another process waits for the core and this one has used up its turn. A thread
    that sleeps instead of looking keeps its turn, and is run as soon as it is woken.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._count = 0
        self._lost_s = 0.0

    def lost_lately(self) -> bool:
        """Tell whether the core was taken from this thread in the last moments."""
        count = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        thread, now = threading.get_ident(), now_s()
        if thread == self._thread and count > self._count:
            self._lost_s = now + _LATELY_S
        self._thread, self._count = thread, count
        return now < self._lost_s
