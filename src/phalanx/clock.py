"""The one place that reads the clock, or lets time pass."""

from __future__ import annotations

import time

__all__ = ["now_s", "pause", "wall_clock_s"]


def now_s() -> float:
    """Return monotonic seconds; only differences mean anything."""
    return time.perf_counter()


def pause(seconds: float) -> None:
    """Let other threads and processes run for about ``seconds``."""
    time.sleep(seconds)


def wall_clock_s() -> float:
    """Return seconds since 1970, which processes of one machine can compare."""
    return time.time()
