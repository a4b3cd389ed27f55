"""Readers–writer locks on ranges of a file, which the kernel releases when their owner dies.

    file       |  bytes 0 .. 63  |  64 .. 127  | ...           ranges: of a region, or of any file
    in front   |  RangeLock      |  RangeLock  |               one per process and range, for its
                                                               threads: its readers share one lock
    behind     an OFD lock of the process's own open file on the same bytes

An OFD lock belongs to an open file, not to a process (as the older POSIX locks do, which vanish
when anything in the process closes the file). So every process opens the file anew, and a forked
child, which has inherited the open file, lets go of it.

# Note [Order of waiters]
Each range has a turnstile, a second range 2^62 bytes further on, where no byte is. A waiter stands
in the turnstile: readers together, a writer alone. A later one looks at the turnstile first and,
where one of the other kind stands in it, goes there too. So a stream of readers does not keep a
writer out, nor one of writers a reader. There is no order among waiters for the turnstile itself.

# Note [Ctrl-C]
Python raises KeyboardInterrupt between any two calls: as `__exit__` begins, before its first line,
or when the kernel has given the lock and nobody has noted it. So ``with`` is given a token instead
of a method, a `partial`. It lies on the holder's stack and nowhere else: a traceback keeps the
frames of what the token calls, not the token. It is there before the lock is asked for, and goes
when the block is left, however it is left; then its weak reference calls :meth:`_Guard.lost`, which
releases what has not been released. A thread that finds the lock taken by another of its process
looks whether that one's token is still there, because a second interrupt may have stopped even
`lost`. What was half written is left as a death leaves it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from phalanx.errors import ConfigError, OutOfSpace, PeerTimeout, StateError
from phalanx.ipc.at_fork import register_at_fork
from phalanx.ipc.liveness import Waiting
from phalanx.ipc.lock_owners import LockOwner, describe_lock_owners, find_lock_owners
from phalanx.ipc.region import Region, telling_of_descriptors

__all__ = ["LockFile", "RangeLock"]

_TURNSTILE = 1 << 62
_BUSY = (errno.EAGAIN, errno.EACCES)
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_SET, _GET = fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK
_READ, _WRITE, _NONE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
_FREE = struct.pack("@h", _NONE)  # how an answer begins that names no owner


class LockFile:
    """A process's own opening of a file, for locks on ranges of it.

    Args:
        file: A region or a file descriptor; neither is needed afterwards.
        rank_of: Tells as which rank a process works, if as one; for errors.

    Raises:
        ConfigError: It cannot be opened anew.
        OutOfSpace: There is no descriptor left.

    Example:
        >>> with LockFile(Region.create(4096)) as file:
        ...     lock = file.range(0, 64, label="row 0")
        ...     with lock.exclusive(), file.range(64, 64).shared():
        ...         print(lock)
        RangeLock('row 0', bytes 0 to 63)
    """

    def __init__(
        self, file: Region | int, *, rank_of: Callable[[int], int | None] = lambda _: None
    ) -> None:
        self.rank_of = rank_of
        fd = file if isinstance(file, int) else file.fd
        try:
            with telling_of_descriptors(f"locks on {file!r}"):
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OutOfSpace:
            raise
        except OSError as exc:
            raise ConfigError(
                f"`file` must be a file that can be opened anew through /proc, but is {file!r} "
                f"({exc.strerror})."
            ) from exc
        self._mutex = threading.Lock()
        # Weak, because a lock holds its file: keeping the lock is enough.
        self._locks: weakref.WeakValueDictionary[tuple[int, int], RangeLock] = (
            weakref.WeakValueDictionary()
        )
        register_at_fork(self.forget)

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

    def close(self, timeout_s: float = 30.0) -> None:
        """Close the file. Its ranges are refused from now on.

        Raises:
            StateError: This thread holds a range, or another one of this process held it for
                ``timeout_s`` seconds. The file is still open.

        Blocks: Until the other threads of this process have let go.
        """
        with self._mutex:
            if self._fd < 0:
                return
            locks = list(self._locks.values())
            try:
                for lock in locks:
                    lock.disable()
                waiting = Waiting(timeout_s)
                for lock in locks:
                    lock.await_free(waiting)
            except BaseException:
                for lock in locks:
                    lock.enable(self._fd)
                raise
            fd, self._fd = self._fd, -1
            for lock in locks:
                lock.forget()
            os.close(fd)
            self.rank_of = lambda _: None  # it may hold this file

    def forget(self) -> None:
        """Let go in a forked child: closing its copy leaves the parent's locks alone."""
        self._mutex = threading.Lock()  # a thread that is not here may have held it
        fd, self._fd = self._fd, -1
        for lock in list(self._locks.values()):
            lock.forget()
        if fd >= 0:
            os.close(fd)

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
    an owner dies the lock is free at once, and says nothing about what the dead had half written.
    """

    def __init__(self, file: LockFile, fd: int, start: int, num_bytes: int, label: str) -> None:
        """Not for callers, who have :meth:`LockFile.range`."""
        self._file = file  # kept open
        self.start = start
        self.num_bytes = num_bytes
        self.label = label
        self._fd = fd  # to take with; -1 refuses
        self._open_fd = fd  # to let go with
        self._turn = threading.RLock()  # held by the one thread of ours that tries to come in
        self._state = threading.Lock()  # around the two below; never held over a wait
        self._guards: dict[_Guard, None] = {}
        self._writing = False  # held by one writer, else by readers
        self._waiting: dict[_Guard, None] = {}
        self._read = _FLOCK.pack(_READ, os.SEEK_SET, start, num_bytes, 0)
        self._write = _FLOCK.pack(_WRITE, os.SEEK_SET, start, num_bytes, 0)
        self._none = _FLOCK.pack(_NONE, os.SEEK_SET, start, num_bytes, 0)
        turnstile = (os.SEEK_SET, _TURNSTILE + start, num_bytes, 0)
        self._turnstile_read = _FLOCK.pack(_READ, *turnstile)
        self._turnstile_write = _FLOCK.pack(_WRITE, *turnstile)
        self._turnstile_none = _FLOCK.pack(_NONE, *turnstile)

    def shared(self, timeout_s: float = 30.0) -> _Guard:
        """Hold the range with other readers: ``with lock.shared(): …``.

        Raises:
            PeerTimeout: A writer held it, or stood in line, for ``timeout_s`` seconds.
            StateError: The file is closed, or was opened before this process was forked.

        Blocks: Until no writer holds it.
        """
        return _Guard(self, self._try_shared, timeout_s)

    def exclusive(self, timeout_s: float = 30.0) -> _Guard:
        """Hold the range alone: ``with lock.exclusive(): …``.

        Raises:
            PeerTimeout: Others held it, or stood in line, for ``timeout_s`` seconds.
            StateError: The file is closed, or was opened before this process was forked.

        Blocks: Until nobody else holds it.
        """
        return _Guard(self, self._try_exclusive, timeout_s)

    def looks_free(self) -> bool:
        """Tell whether nobody holds the range at this moment; the next one may be another's.

        Raises:
            StateError: The file is closed, or was opened before this process was forked.
        """
        return not self._guards and self._is_free(self._write)

    def acquire(self, guard: _Guard) -> None:
        """Take the range for a guard, whose ``with`` begins."""
        with self._state:
            if not self._waiting and guard.attempt(guard, False):
                return
            self._waiting[guard] = None
        self._wait(guard)

    def release(self, guard: _Guard, *_exc_info: object) -> None:
        """Let go for a guard, if it has not let go."""
        with self._state:
            if guard in self._guards:
                self._drop(guard)
        guard.token = None

    def stop_waiting(self, guard: _Guard) -> None:
        """Leave the wait queue, if queued."""
        if guard in self._waiting:
            with suppress(RuntimeError):  # it is not this thread's turn
                self._turn.release()
            self._waiting.pop(guard, None)

    def disable(self) -> None:
        """Refuse all use from now on; a holder goes on."""
        self._fd = -1

    def enable(self, fd: int) -> None:
        """Undo :meth:`disable`."""
        self._fd = fd

    def await_free(self, waiting: Waiting) -> None:
        """Wait until no thread of this process holds the range or waits for it."""
        while True:
            with self._state:
                held = self._held()
                own = [guard for guard in held if guard.thread == threading.get_ident()]
                if not held and all(guard.left() for guard in list(self._waiting)):
                    return
            if own or waiting.over():
                who = "this thread" if own else "another thread of this process"
                raise StateError(
                    f"Lock {self.label!r} must be free when its file is closed, but {who} holds "
                    "it. Close it when that has ended."
                )
            waiting.rest()

    def forget(self) -> None:
        """Refuse all use, and leave the file alone; in a forked child its threads are not there."""
        self._fd = self._open_fd = -1
        self._turn, self._state = threading.RLock(), threading.Lock()

    # --- trying: `_state` is held -----------------------------------------------------------------

    def _try_shared(self, guard: _Guard, in_line: bool) -> bool:
        if self._writing and self._held():
            return False
        if not (in_line or self._is_free(self._turnstile_read)):
            return False
        if self._guards:
            self._guards[guard] = None
            return True
        self._writing = False
        return self._take(guard, self._read)

    def _try_exclusive(self, guard: _Guard, in_line: bool) -> bool:
        if self._guards and self._held():
            return False
        if not (in_line or self._is_free(self._turnstile_write)):
            return False
        self._writing = True
        return self._take(guard, self._write)

    def _held(self) -> list[_Guard]:
        """Return the guards that hold it; drop those whose block was left unnoticed."""
        for guard in list(self._guards):
            if guard.left():
                self._drop(guard)
        return list(self._guards)

    def _take(self, guard: _Guard, request: bytes) -> bool:
        self._guards[guard] = None
        try:
            taken = self._set(request)
        except BaseException:
            self._drop(guard)
            raise
        if not taken:
            del self._guards[guard]
        return taken

    def _drop(self, guard: _Guard) -> None:
        del self._guards[guard]  # a statement, so no interrupt comes between it and the next call
        if not self._guards and self._open_fd >= 0:
            fcntl.fcntl(self._open_fd, _SET, self._none)

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

    def _is_free(self, request: bytes) -> bool:
        try:
            answer = fcntl.fcntl(self._fd, _GET, request)
        except (OSError, ValueError) as exc:
            raise self._cannot(exc) from exc
        return answer.startswith(_FREE)

    # --- waiting ----------------------------------------------------------------------------------

    def _wait(self, guard: _Guard) -> None:
        waiting = Waiting(guard.timeout_s)
        try:
            if not self._turn.acquire(timeout=min(waiting.remaining_s(), threading.TIMEOUT_MAX)):
                raise self._late(guard)
            self._stand_in_line(guard, waiting)
        finally:
            self.stop_waiting(guard)

    def _stand_in_line(self, guard: _Guard, waiting: Waiting) -> None:
        exclusive = guard.attempt == self._try_exclusive
        request = self._turnstile_write if exclusive else self._turnstile_read
        in_line = False
        try:
            while True:
                in_line = in_line or self._set(request)
                with self._state:
                    if guard.attempt(guard, in_line):
                        return
                if waiting.over():
                    raise self._late(guard)
                waiting.rest()
        finally:
            if self._open_fd >= 0:  # also where nobody could note that we are in line
                fcntl.fcntl(self._open_fd, _SET, self._turnstile_none)

    def _late(self, guard: _Guard) -> PeerTimeout:
        what = "free" if guard.attempt == self._try_exclusive else "free of writers"
        owners = self._owners()
        ranks = [self._file.rank_of(pid) for pid, _ in owners if pid != os.getpid()]
        return PeerTimeout(
            f"Lock {self.label!r} did not become {what} within {guard.timeout_s:g} s: "
            f"{describe_lock_owners(owners)}.",
            next((rank for rank in ranks if rank is not None), None),
        )

    def _owners(self) -> list[LockOwner]:
        try:
            return find_lock_owners(self._open_fd, self.start, self.start + self.num_bytes)
        except OSError:  # closed meanwhile
            return []

    def _cannot(self, exc: OSError | ValueError) -> StateError:
        if self._fd < 0:
            return StateError(
                f"Lock {self.label!r} must belong to an open file of this process, but its file is "
                "closed. After a fork, make a new `LockFile`."
            )
        return StateError(f"Lock {self.label!r} must be on a file that has OFD locks ({exc}).")

    def __repr__(self) -> str:
        return f"RangeLock({self.label!r}, bytes {self.start} to {self.start + self.num_bytes - 1})"


class _Guard:
    """What one ``with`` holds a lock by; see Note [Ctrl-C] for how it ends."""

    __slots__ = ("attempt", "lock", "thread", "timeout_s", "token")

    def __init__(
        self, lock: RangeLock, attempt: Callable[[_Guard, bool], bool], timeout_s: float
    ) -> None:
        self.lock = lock
        self.attempt = attempt
        self.timeout_s = timeout_s
        self.thread = threading.get_ident()
        self.token: weakref.ref[partial[None]] | None = None

    def __enter__(self) -> None:
        self.lock.acquire(self)

    @property
    def __exit__(self) -> Callable[..., None]:
        """Make the token; ``with`` asks for it before it enters."""
        token = partial(self.lock.release, self)
        self.token = weakref.ref(token, self.lost)
        return token

    def lost(self, _token: object) -> None:
        """Release what is still held: the block was left."""
        self.lock.stop_waiting(self)
        self.lock.release(self)

    def left(self) -> bool:
        """Tell whether the block was left."""
        return self.token is not None and self.token() is None
