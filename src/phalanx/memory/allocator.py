"""Keep freed memory in the process, so that every step finds the pages of the step before.

glibc hands large blocks back to the kernel as soon as they are free. A training step frees and asks
for the same megabytes again and again; each time the kernel clears and maps pages anew under a lock
that all replica threads share. What it gave, and when nothing: docs/decisions/0004. The price: the
process keeps the memory of its largest step until it ends.
"""

from __future__ import annotations

import ctypes

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory; return False where it cannot be asked (not glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows knows no CDLL(None)
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> None:
    """Hand what is free now back to the kernel, once; where the C library cannot, do nothing."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # as above
        return
    trim(0)
