"""Keep freed memory in a process of our own, so that each step finds the pages of the step before.

glibc gives large blocks back to the kernel as soon as they are freed. A training step frees and
allocates the same megabytes each time, and the kernel clears and maps their pages anew. The price
of keeping them: the process holds the memory of its largest step until it ends, so a user's process
is left alone (docs/decisions/0004).
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory for good; do nothing where it is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no CDLL(None)
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
