"""The one place that reads the clock, or lets time pass."""

from __future__ import annotations

import time

__all__ = ["now_s", "pause"]


def now_s() -> float:
    """Return monotonic seconds; only differences mean anything."""
    return time.perf_counter()


def pause(seconds: float) -> None:
    """Let other threads and processes run for about ``seconds``."""
    time.sleep(seconds)
