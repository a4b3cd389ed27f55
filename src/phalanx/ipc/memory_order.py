"""The order in which one process sees what another has written.

x86 keeps the order of stores and the order of loads, so there is nothing to do. Elsewhere a lock is
taken twice: its release keeps what is before it before, its next acquisition keeps what follows
after, and the two are not exchanged. Not tried on such a machine.
"""

from __future__ import annotations

import platform
import threading

_KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
_fence_lock = threading.Lock()


def fence() -> None:
    """Keep what this thread wrote before from being seen after what it writes next."""
    if not _KEEPS_ORDER:
        with _fence_lock:
            pass
        with _fence_lock:
            pass
