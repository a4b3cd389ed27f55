"""Keep cores from falling asleep in the moments in which their threads wait for each other.

    core 0   ████ replica 0 ████▁▁▁ step ██ replica 0 ███     ▁ somebody waits: for the other, for
    core 1   ███ replica 1 ▁▁▁▁▁▁▁▁ step ██ replica 1 ███       the interpreter, or to be woken

A core that nobody wants falls asleep at once, and takes 50 to 150 µs to wake up again; that of a
virtual machine is given to others meanwhile. A step of some milliseconds has a dozen such moments.
So where there is a thread of ours for every core, a watcher of the kernel's lowest class sits on
each: it gives the core up to whoever comes, and sleeps when nobody has come for two milliseconds,
or 50 after the last call (awake.c).

Watchers are for runs of our own: worker processes, and what the commands of `phalanx` start. In
the process of a user they stand only where ``PHALANX_KEEP_AWAKE=1`` asks for them; with 0 they
stand nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from phalanx.ipc import cores_allowed
from phalanx.memory.compiled import compiled_function

__all__ = ["cores_to_watch", "keep_awake"]

_KEEP_AWAKE = "PHALANX_KEEP_AWAKE"  # 1, 0, or nothing: only in runs of our own

_MOST_CORES = 16  # with more, waking the watchers takes longer than they save

_watched: dict[int, set[int]] = {}  # by process: a fork has not its parent's threads


def keep_awake(
    num_threads: int, *, place: int = 0, sharers: int = 1, ours: bool = False
) -> Callable[[], object]:
    """Watch the cores if so many threads have them all; return what keeps them awake for a moment.

    That is to be called whenever work begins. Where nothing is to be watched it does nothing.

    Args:
        num_threads: How many threads work at once, each inside operators alone.
        place: Which of the processes this is that watch the cores together.
        sharers: How many those are.
        ours: Whether this process is one of our own, which watches unless told not to.

    Example:
        >>> stay_awake = keep_awake(1)
        >>> _ = stay_awake()
    """
    watch, stay_awake = compiled_function("watch_core"), compiled_function("keep_awake")
    wanted = {"0": False, "1": True}.get(os.environ.get(_KEEP_AWAKE, ""), ours)
    cores = cores_to_watch(num_threads) if wanted else []
    if watch is None or stay_awake is None or not cores:
        return bool
    watched = _watched.setdefault(os.getpid(), set())
    for core in cores[place % len(cores) :: sharers]:
        if core not in watched and watch(core):
            watched.add(core)
    return stay_awake


def cores_to_watch(num_threads: int) -> list[int]:
    """Return the cores that this process may run on, if so many threads have them all.

    None where its use of them is limited: what a watcher takes would be missing later.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return (
        [] if len(cores) > min(num_threads, _MOST_CORES) or cores_allowed() is not None else cores
    )
