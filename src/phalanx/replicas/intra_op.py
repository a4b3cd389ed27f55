"""How many threads torch uses inside one operator, and whose.

With OpenMP the number belongs to the calling thread; the last number set anywhere is also what
threads born later start with. And a pool that has just worked spins for a while before it sleeps:
beside replica threads a caller's spinning pool cost a factor of 1.8.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

__all__ = [
    "caller_intra_op",
    "hold_caller_at_one_thread",
    "num_cores",
    "set_intra_op",
]


def num_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_intra_op(count: int) -> None:
    """Set the number of threads inside operators that the calling thread runs."""
    torch.get_num_threads()  # else a new thread's first operator takes the last number set
    torch.set_num_threads(count)


class _Holders:
    """Who keeps the caller's operators on one thread at present; the last to leave restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = 1

    def enter(self) -> None:
        with self._lock:
            if self._count == 0:
                self._before = torch.get_num_threads()
                set_intra_op(1)
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                set_intra_op(self._before)


_holders = _Holders()  # one for the process, as the number of threads is


def hold_caller_at_one_thread(owner: object) -> Callable[[], object]:
    """Keep the caller's operators on one thread until the returned function is called.

    Or until ``owner`` is collected. When several hold, the number comes back with the last.
    """
    _holders.enter()
    return weakref.finalize(owner, _holders.leave)


@contextlib.contextmanager
def caller_intra_op(count: int) -> Iterator[None]:
    """Run the body with ``count`` threads inside the caller's operators; what it sets ends, too."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
