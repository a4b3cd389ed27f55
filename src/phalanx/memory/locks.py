"""Readers–writer locks on ranges of a file, which the kernel releases when their holder dies.

    file       |  bytes 0 .. 63  |  64 .. 127  | ...           ranges: of a region, or of any file
    in front   |  RangeLock      |  RangeLock  |               one per process and range, for its
                                                               threads: its readers share one lock
    behind     an OFD lock of the process's own open file on the same bytes

An OFD lock belongs to an open file, not to a process (as the older POSIX locks do, which vanish
when anything in the process closes the file). So every process opens the file anew, and a forked
child, who has inherited the open file, lets go of it.

# Note [Who comes first]
Each range has a turnstile, a second range 2^62 bytes further on, where no byte is. Who finds the
range taken waits in the turnstile: readers together, a writer alone. Who comes later looks at the
turnstile first and, where somebody of the other kind stands in it, goes there too. So a stream of
readers does not keep a writer out, nor one of writers a reader. Among those who wait for the
turnstile itself there is no order.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import weakref
from types import TracebackType

from phalanx.errors import ConfigError, PeerTimeout, StateError
from phalanx.memory.forks import forget_in_child
from phalanx.memory.holders import describe_holders
from phalanx.memory.region import Region
from phalanx.memory.waiting import Waiting

__all__ = ["LockFile", "RangeLock"]

_TURNSTILE = 1 << 62
_BUSY = (errno.EAGAIN, errno.EACCES)
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_SET, _GET = fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK
_READ, _WRITE, _NONE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
_FREE = struct.pack("@h", _NONE)  # how an answer begins that names no holder


class LockFile:
    """A process's own opening of a file, for locks on ranges of it.

    Args:
        file: A region or a file descriptor; neither is needed afterwards.

    Raises:
        ConfigError: It cannot be opened anew.

    Example:
        >>> with LockFile(Region.create(4096)) as file:
        ...     lock = file.range(0, 64, label="row 0")
        ...     with lock.exclusive(), file.range(64, 64).shared():
        ...         print(lock)
        RangeLock('row 0', bytes 0 to 63)
    """

    def __init__(self, file: Region | int) -> None:
        fd = file if isinstance(file, int) else file.fd
        try:
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise ConfigError(
                f"`file` must be a file that can be opened anew through /proc, but is {file!r} "
                f"({exc.strerror})."
            ) from exc
        self._mutex = threading.Lock()
        # Weak, because a lock holds its file: who keeps the lock need not keep the file as well.
        self._locks: weakref.WeakValueDictionary[tuple[int, int], RangeLock] = (
            weakref.WeakValueDictionary()
        )
        forget_in_child(self)

    def range(self, start: int, num_bytes: int, *, label: str = "lock") -> RangeLock:
        """Return this process's lock on a range; the same object as long as anybody keeps it.

        Args:
            start: Its first byte. The file need not reach so far.
            num_bytes: Its length. Nothing is stored there.
            label: What it is called in messages; that of the first call counts.

        Raises:
            ConfigError: The range overlaps another one of this process, or is none.
        """
        if start < 0 or num_bytes < 1 or start + num_bytes > _TURNSTILE:
            raise ConfigError(
                "`start` and `num_bytes` must be a range of bytes from 0 on, but are "
                f"{start!r} and {num_bytes!r}."
            )
        with self._mutex:
            lock = self._locks.get((start, num_bytes))
            if lock is None:
                self._refuse_overlap(start, start + num_bytes)
                lock = RangeLock(self, self._fd, start, num_bytes, label)
                self._locks[start, num_bytes] = lock
            return lock

    def _refuse_overlap(self, start: int, stop: int) -> None:
        for other, num_bytes in list(self._locks):
            if other < stop and start < other + num_bytes:
                raise ConfigError(
                    f"Ranges must be equal or apart, but bytes {start} to {stop - 1} overlap "
                    f"bytes {other} to {other + num_bytes - 1}."
                )

    def close(self) -> None:
        """Close the file; what is held of it is released."""
        with self._mutex:
            fd, self._fd = self._fd, -1
            for lock in list(self._locks.values()):
                lock.disable()
            if fd >= 0:
                os.close(fd)

    def forget(self) -> None:
        """Let go in a forked child: closing its copy leaves the parent's locks alone."""
        self._mutex = threading.Lock()  # a thread that is not here may have held it
        for lock in list(self._locks.values()):
            lock.forget()
        self.close()

    def __enter__(self) -> LockFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._fd < 0 else ""
        return f"LockFile({len(self._locks)} ranges{state})"


class RangeLock:
    """A readers–writer lock on a range of bytes; made by :meth:`LockFile.range`.

    It excludes threads and processes alike. It is not reentrant: a thread that holds it and asks
    again as a writer, or as a reader of its own writing, waits for itself until the deadline. When
    a holder dies the lock is free at once, and says nothing about what the dead had half written.
    """

    def __init__(self, file: LockFile, fd: int, start: int, num_bytes: int, label: str) -> None:
        """Not for callers, who have :meth:`LockFile.range`."""
        self._file = file  # kept open
        self.start = start
        self.num_bytes = num_bytes
        self.label = label
        self._fd = fd
        self._turn = threading.Lock()  # held by the one thread of ours that tries to come in
        self._state = threading.Lock()  # around the three below; never held over a wait
        self._num_waiting = 0
        self._num_readers = 0
        self._writing = False
        self._read = _FLOCK.pack(_READ, os.SEEK_SET, start, num_bytes, 0)
        self._write = _FLOCK.pack(_WRITE, os.SEEK_SET, start, num_bytes, 0)
        self._none = _FLOCK.pack(_NONE, os.SEEK_SET, start, num_bytes, 0)
        turnstile = (os.SEEK_SET, _TURNSTILE + start, num_bytes, 0)
        self._turnstile_read = _FLOCK.pack(_READ, *turnstile)
        self._turnstile_write = _FLOCK.pack(_WRITE, *turnstile)
        self._turnstile_none = _FLOCK.pack(_NONE, *turnstile)

    def shared(self, timeout_s: float = 30.0) -> _Shared:
        """Hold the range with other readers: ``with lock.shared(): …``.

        Raises:
            PeerTimeout: A writer held it, or stood in line, for ``timeout_s`` seconds.
            StateError: The file is closed, or was opened before this process was forked.

        Blocks: Until no writer holds it.
        """
        return _Shared(self, timeout_s)

    def exclusive(self, timeout_s: float = 30.0) -> _Exclusive:
        """Hold the range alone: ``with lock.exclusive(): …``.

        Raises:
            PeerTimeout: Others held it, or stood in line, for ``timeout_s`` seconds.
            StateError: The file is closed, or was opened before this process was forked.

        Blocks: Until nobody else holds it.
        """
        return _Exclusive(self, timeout_s)

    def acquire_shared(self, timeout_s: float) -> None:
        """Begin to read; :meth:`release_shared` ends it."""
        with self._state:
            if not self._num_waiting and self._try_shared(False):
                return
            self._num_waiting += 1
        self._wait(False, timeout_s)

    def release_shared(self) -> None:
        """End what :meth:`acquire_shared` began."""
        with self._state:
            self._num_readers -= 1
            if self._num_readers == 0 and self._fd >= 0:
                fcntl.fcntl(self._fd, _SET, self._none)

    def acquire_exclusive(self, timeout_s: float) -> None:
        """Begin to write; :meth:`release_exclusive` ends it."""
        with self._state:
            if not self._num_waiting and self._try_exclusive(False):
                return
            self._num_waiting += 1
        self._wait(True, timeout_s)

    def release_exclusive(self) -> None:
        """End what :meth:`acquire_exclusive` began."""
        with self._state:
            self._writing = False
            if self._fd >= 0:
                fcntl.fcntl(self._fd, _SET, self._none)

    def disable(self) -> None:
        """Refuse all use from now on; what is held counts as released."""
        self._fd = -1

    def forget(self) -> None:
        """Refuse all use in a forked child, where threads that held our mutexes are not."""
        self._fd = -1
        self._turn, self._state = threading.Lock(), threading.Lock()

    # --- trying: `_state` is held -----------------------------------------------------------------

    def _try_shared(self, in_line: bool) -> bool:
        if self._writing or not (in_line or self._nobody_waits(self._turnstile_read)):
            return False
        if self._num_readers == 0 and not self._set(self._read):
            return False
        self._num_readers += 1
        return True

    def _try_exclusive(self, in_line: bool) -> bool:
        if self._writing or self._num_readers:
            return False
        if not (in_line or self._nobody_waits(self._turnstile_write)):
            return False
        self._writing = self._set(self._write)
        return self._writing

    def _set(self, request: bytes) -> bool:
        try:
            fcntl.fcntl(self._fd, _SET, request)
        except OSError as exc:
            if exc.errno in _BUSY:
                return False
            raise self._cannot(exc) from exc
        except ValueError as exc:  # a negative descriptor
            raise self._cannot(exc) from exc
        return True

    def _nobody_waits(self, request: bytes) -> bool:
        try:
            answer = fcntl.fcntl(self._fd, _GET, request)
        except (OSError, ValueError) as exc:
            raise self._cannot(exc) from exc
        return answer.startswith(_FREE)

    # --- waiting ----------------------------------------------------------------------------------

    def _wait(self, exclusive: bool, timeout_s: float) -> None:
        waiting = Waiting(timeout_s)
        try:
            if not self._turn.acquire(timeout=min(waiting.remaining_s(), threading.TIMEOUT_MAX)):
                raise self._late(exclusive, timeout_s)
            try:
                self._stand_in_line(exclusive, timeout_s, waiting)
            finally:
                self._turn.release()
        finally:
            with self._state:
                self._num_waiting -= 1

    def _stand_in_line(self, exclusive: bool, timeout_s: float, waiting: Waiting) -> None:
        attempt = self._try_exclusive if exclusive else self._try_shared
        request = self._turnstile_write if exclusive else self._turnstile_read
        in_line = False
        try:
            while True:
                in_line = in_line or self._set(request)
                with self._state:
                    if attempt(in_line):
                        return
                if waiting.over():
                    raise self._late(exclusive, timeout_s)
                waiting.rest()
        finally:
            if in_line and self._fd >= 0:
                self._set(self._turnstile_none)

    def _late(self, exclusive: bool, timeout_s: float) -> PeerTimeout:
        what = "free" if exclusive else "free of writers"
        stop = self.start + self.num_bytes
        return PeerTimeout(
            f"Lock {self.label!r} must become {what} within {timeout_s:g} s, but "
            f"{describe_holders(self._fd, self.start, stop)}."
        )

    def _cannot(self, exc: OSError | ValueError) -> StateError:
        if self._fd < 0:
            return StateError(
                f"Lock {self.label!r} must belong to an open file of this process, but its file is "
                "closed. After a fork, make a new `LockFile`."
            )
        return StateError(f"Lock {self.label!r} must be on a file that has OFD locks ({exc}).")

    def __repr__(self) -> str:
        return f"RangeLock({self.label!r}, bytes {self.start} to {self.start + self.num_bytes - 1})"


class _Shared:
    """A reader's hold on a lock."""

    __slots__ = ("_lock", "_timeout_s")

    def __init__(self, lock: RangeLock, timeout_s: float) -> None:
        self._lock = lock
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._lock.acquire_shared(self._timeout_s)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._lock.release_shared()


class _Exclusive:
    """A writer's hold on a lock."""

    __slots__ = ("_lock", "_timeout_s")

    def __init__(self, lock: RangeLock, timeout_s: float) -> None:
        self._lock = lock
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._lock.acquire_exclusive(self._timeout_s)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._lock.release_exclusive()
