"""What the C library does with freed memory.

A process of our own keeps it, so that each step finds the pages of the step before.

glibc gives large blocks back to the kernel as soon as they are freed. A training step frees and
allocates the same megabytes each time, and the kernel clears and maps their pages anew. The price
of keeping them: the process holds the memory of its largest step until it ends, so a user's process
is left alone (docs/decisions/0004).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["keep_freed_memory", "return_freed_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory for good; do nothing where it is not glibc."""
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Give back to the system what was freed, where tensors have moved elsewhere."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; None where the C library is another."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # Windows has no CDLL(None)
        return None
    return found
