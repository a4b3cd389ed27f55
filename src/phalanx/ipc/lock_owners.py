"""The owners of a lock on a file, asked of the kernel when a wait has failed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["LockOwner", "describe_lock_owners", "find_lock_owners"]


class LockOwner(NamedTuple):
    """A process that holds a lock.

    Attributes:
        pid: Its number.
        writing: Whether it excludes readers too.
    """

    pid: int
    writing: bool


def find_lock_owners(fd: int, start: int, stop: int) -> list[LockOwner]:
    """Return the owners of OFD locks on bytes ``start`` to ``stop`` of a file, by number.

    The kernel does not tell the owner of such a lock (its ``l_pid`` is -1), but shows each process
    the locks of its open files. Files of other users, and of processes that are not visible from
    here, are left out. It looks through all processes, so it takes milliseconds.
    """
    wanted = os.fstat(fd)
    found: dict[int, bool] = {}
    for pid, number in _open_files():
        try:
            there = os.stat(f"/proc/{pid}/fd/{number}")
            if (there.st_dev, there.st_ino) != (wanted.st_dev, wanted.st_ino):
                continue
            with open(f"/proc/{pid}/fdinfo/{number}") as file:
                lines = file.readlines()
        except OSError:
            continue  # closed, ended or hidden meanwhile
        for writing in _locks(lines, start, stop):
            found[pid] = found.get(pid, False) or writing
    return [LockOwner(pid, writing) for pid, writing in sorted(found.items())]


def describe_lock_owners(holders: Sequence[LockOwner]) -> str:
    """Say which processes hold a lock, for the end of a sentence."""
    if not holders:
        return "it is held, or waited for, by a process that cannot be seen from here"
    words = [
        f"process {holder.pid}{' (this one)' * (holder.pid == os.getpid())} "
        f"{'writes' if holder.writing else 'reads'}"
        for holder in holders
    ]
    return ", ".join(words)


def _open_files() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                numbers = os.listdir(f"/proc/{entry}/fd")
            except OSError:
                continue
            for number in numbers:
                yield int(entry), number


def _locks(lines: list[str], start: int, stop: int) -> Iterator[bool]:
    """Read lines such as ``lock: 1: OFDLCK ADVISORY  WRITE -1 00:01:1026 64 127``."""
    for line in lines:
        words = line.split()
        if len(words) == 9 and words[0] == "lock:" and words[2] == "OFDLCK":
            first, last = int(words[7]), words[8]
            if first < stop and (last == "EOF" or int(last) >= start):
                yield words[4] == "WRITE"
