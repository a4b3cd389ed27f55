"""Bytes that several processes share.

A region is a file without a name, mapped by everybody who holds its descriptor. The kernel counts
the holders: the last one to go, however it goes, frees the memory. So there is nothing to unlink,
nothing to sweep up after a crash, and no process without the descriptor can find it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import weakref
from pathlib import Path

import torch

from phalanx.errors import OutOfSpace, PeerLost
from phalanx.ipc.limits import available_memory_bytes

ALIGN_BYTES = 64  # of whatever begins in memory: a line of the cache, the widest vector


def aligned(nbytes: int) -> int:
    """Round a size up to a multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SMALL_BYTES = 1 << 20  # not worth the half millisecond of asking how much memory is left
_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


class Region:
    """Bytes shared between processes, as long as the object or a tensor over them lives.

    A forked child simply has it. Until Python 3.13 a region holds two file descriptors.

    Args:
        fd: The descriptor of its file, which is taken over, even on failure.
        label: Its name in messages.
        directory: Where its file lies, for messages; None for memory.

    Attributes:
        nbytes: Its size.

    Example:
        >>> region = Region.create(1 << 16, label="weights")
        >>> weights = region.tensor(torch.float32, 3)
        >>> twin = region.tensor(torch.float32, 3)
        >>> weights.fill_(2.0).tolist(), twin.tolist()
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0])
    """

    def __init__(self, fd: int, label: str = "region", directory: Path | None = None) -> None:
        closing = weakref.finalize(self, os.close, fd)
        self.fd = fd
        self.label = label
        self._directory = directory
        try:
            self.nbytes = os.fstat(fd).st_size
            self._mapping = _map(fd, self.nbytes)
        except BaseException:
            closing()  # the error's traceback holds `self`, and with it the descriptor
            raise

    @classmethod
    def create(cls, nbytes: int, *, label: str = "region", reserved: int | None = None) -> Region:
        """Make a region of ``nbytes`` zeros and reserve its memory now.

        It is anonymous memory, which the size of ``/dev/shm`` does not limit. Without a reservation
        the lack of memory would show later, as a SIGBUS in the process that touches a page first.

        Args:
            nbytes: Its size, at least 1.
            label: Its name in messages.
            reserved: How many of its first bytes have memory now; None for all. Before others are
                touched comes :meth:`reserve_part`.

        Raises:
            OutOfSpace: There is not so much memory.
        """
        fd = os.memfd_create("phalanx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            reserve(fd, nbytes if reserved is None else reserved, label, None)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # nobody can pull the memory away
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, label)

    @classmethod
    def borrow(cls, pid: int, fd: int, *, label: str = "region") -> Region:
        """Map the region that another process of this user holds as its descriptor ``fd``.

        Raises:
            PeerLost: There is no such process or descriptor, it is no region, or the kernel does
                not show it.
        """
        try:
            ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if fcntl.fcntl(ours, fcntl.F_GET_SEALS) != _SEALS:  # only what `create` has made
                    raise OSError(errno.EBADF, "no region of ours")
            except OSError:
                os.close(ours)
                raise
        except OSError as exc:
            raise PeerLost(
                f"Region {label!r} of process {pid} cannot be opened ({exc.strerror}). Both must "
                "be processes of one user that see each other."
            ) from exc
        return cls(ours, label)

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._mapping)

    def tensor(self, dtype: torch.dtype, num_elements: int, offset_bytes: int = 0) -> torch.Tensor:
        """Return a 1-D tensor over the region's memory; it keeps the memory alive.

        Args:
            dtype: Of the tensor.
            num_elements: Its length; 0 is allowed.
            offset_bytes: Where it begins, a multiple of 64.
        """
        if num_elements == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with torch.inference_mode(False):  # else nobody could write to it outside of that mode
            return torch.frombuffer(
                self._mapping, dtype=dtype, count=num_elements, offset=offset_bytes
            )

    def reserve_part(self, start: int, nbytes: int) -> None:
        """Reserve the memory of a part of a region that was made without a reservation.

        Raises:
            OutOfSpace: There is not so much.
        """
        reserve(self.fd, nbytes, self.label, self._directory, start=start)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, trackfd=False)
    return mmap.mmap(fd, nbytes)


def reserve(fd: int, nbytes: int, label: str, directory: Path | None, *, start: int = 0) -> None:
    """Have ``nbytes`` of a file backed by memory from now on; it grows where it is shorter.

    Args:
        fd: The file.
        nbytes: How many.
        label: The name of its contents, for the error.
        directory: Where it lies, for the error; None for memory without a name.
        start: Where in the file they begin.

    Raises:
        OutOfSpace: There is not so much.
    """
    if not nbytes:
        return
    # The kernel grants memory page by page, and rather kills a process than refuses one.
    available = available_memory_bytes() if nbytes > _SMALL_BYTES else None
    if available is not None and nbytes > available:
        raise _out_of_space(nbytes, available, label, None)
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as exc:
        if exc.errno not in _NO_SPACE:
            raise
        if directory is not None:
            found = os.statvfs(directory)
            available = found.f_bavail * found.f_frsize
        raise _out_of_space(nbytes, available, label, directory) from exc


def _out_of_space(
    needed: int, available: int | None, label: str, directory: Path | None
) -> OutOfSpace:
    where, way_out = "memory", "Use a smaller model or table, or fewer worker processes."
    if directory is not None:
        where, way_out = f"{str(directory)!r}", "Make room there, or name a folder on another disk."
    free = "less is" if available is None else f"only {available} bytes are"
    return OutOfSpace(
        f"Region {label!r} needs {needed} bytes in {where}, but {free} free. {way_out}",
        needed,
        available,
    )
