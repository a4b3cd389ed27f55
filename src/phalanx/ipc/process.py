"""Which process is meant, although numbers of processes are used again."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from phalanx.errors import PeerLost

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
# Where a line of /proc/<pid>/stat is cut after the name (which may hold blanks and parentheses),
# its third field comes first.
_STATE = 0
_FLAGS = 9 - 3
_START = 22 - 3
_DEAD = ("Z", "X", "x")
_EXITING = 4  # the kernel's PF_EXITING
_STOPPED = ("T", "t")


class ProcessIdentity(NamedTuple):
    """A process of this machine: its number, and when it started.

    A number alone may by now belong to somebody else. The identity is two integers, so it fits
    into shared memory: ``ProcessIdentity(*two_integers)`` is the way back. It means nothing on
    another machine, after a restart of this one, or between containers that do not share their
    process numbers.

    Attributes:
        pid: The process's number.
        start_ticks: When it started, in the kernel's ticks since the machine's start.

    Example:
        >>> me = ProcessIdentity.current()
        >>> me.alive(), ProcessIdentity(me.pid, me.start_ticks - 1).alive()
        (True, False)
    """

    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the calling process's identity."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of the process that has the number ``pid`` now.

        Raises:
            PeerLost: There is no such process, or it has ended.
        """
        fields = _stat_fields(pid)
        if fields is None or fields[_STATE] in _DEAD:
            raise PeerLost(f"Process {pid} has ended.")
        return cls(pid, int(fields[_START]))

    def alive(self) -> bool:
        """Tell whether the process still runs; one that only waits to be reaped does not.

        Nor does one whose memory the kernel takes back, which needs 100 ms on a busy machine.
        """
        fields = _stat_fields(self.pid)
        return (
            fields is not None
            and fields[_STATE] not in _DEAD
            and not int(fields[_FLAGS]) & _EXITING
            and int(fields[_START]) == self.start_ticks
        )

    def stopped(self) -> bool:
        """Tell whether the process is halted, by SIGSTOP or a debugger."""
        fields = _stat_fields(self.pid)
        return fields is not None and fields[_STATE] in _STOPPED


def _stat_fields(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return line[line.rindex(b")") + 2 :].decode("ascii").split()


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process, with SIGKILL, when its parent ends.

    The kernel means the *thread* that started this process: keep that thread for as long as the
    children. Call it first thing in the child; a program that this one starts with other rights
    (set-user-ID) loses the promise.

    Args:
        parent_pid: The process that started this one, as taken before it did.

    Raises:
        PeerLost: That parent has ended already.
        OSError: The kernel does not do it.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # The parent may have ended before the line above; then this process was given another one.
    if os.getppid() != parent_pid:
        raise PeerLost(f"The parent, process {parent_pid}, has ended.")


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of process ``pid``, and to no other of its threads.

    The kernel gives a signal for a process to any thread of it; one that finds the others running
    cannot tell reliably where they are.

    Raises:
        OSError: There is no such process.
    """
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if tgkill is None:  # a C library older than glibc 2.30
        os.kill(pid, number)
    elif tgkill(pid, pid, number) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
