"""The one place that reads the clock."""

from __future__ import annotations

import time

__all__ = ["now_s"]


def now_s() -> float:
    """Return monotonic seconds; only differences mean anything."""
    return time.perf_counter()
