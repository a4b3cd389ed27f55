"""The one place that reads the clock, or lets time pass."""

from __future__ import annotations

import time

__all__ = ["now_s", "pause", "wall_clock_s"]


now_s = time.perf_counter
"""Return monotonic seconds; only differences mean anything."""


def pause(seconds: float) -> None:
    """Let other threads and processes run for about ``seconds``."""
    time.sleep(seconds)


def wall_clock_s() -> float:
    """Return seconds since 1970, which processes of one machine can compare."""
    return time.time()
