"""Bytes that several processes share.

A region is a file without a name, mapped by everybody who holds its descriptor. The kernel counts
the holders: the last one to go, however it goes, frees the memory. So there is nothing to unlink,
nothing to sweep up after a crash, and nobody without the descriptor can find it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import socket
import stat
import struct
import sys
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from phalanx.errors import ConfigError, OutOfSpace, PeerLost, PeerTimeout, StateError
from phalanx.ipc.available_memory import available_memory_bytes

__all__ = [
    "ALIGN_BYTES",
    "NO_DESCRIPTOR",
    "Region",
    "aligned",
    "check_room",
    "reserve",
    "telling_of_descriptors",
]

ALIGN_BYTES = 64  # of whatever begins in memory: a line of the cache, the widest vector


def aligned(nbytes: int) -> int:
    """Round a size up to a multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


# What precedes a descriptor on a connection: a word that multiprocessing never sends (it would be
# the prefix of a message of negative length, at which its `recv` gives up), and the size.
_HEADER = struct.Struct("<8sQ")
_HEADER_MAGIC = b"\xffphlxRgn"
_MEMFD_NAME = "phalanx"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SMALL_BYTES = 1 << 20  # not worth the half millisecond of asking how much memory is left
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


class Region:
    """Bytes shared between processes; made by :meth:`create`, :meth:`attach` or :meth:`receive`.

    A forked child simply has it; to another process :meth:`send` passes its descriptor. Until
    Python 3.13 a region holds two file descriptors, one of them as long as the mapping lives.

    Attributes:
        nbytes: Its size.
        label: What it is called in messages.

    Example:
        >>> with Region.create(1 << 16, label="weights") as region:
        ...     weights = region.tensor(torch.float32, 3)
        ...     twin = region.tensor(torch.float32, 3)
        >>> weights.fill_(2.0).tolist(), twin.tolist()
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0])
    """

    def __init__(self, fd: int, nbytes: int, label: str, directory: Path | None = None) -> None:
        """Take over ``fd``; not for callers, who have :meth:`create` and :meth:`attach`."""
        self._closing = weakref.finalize(self, os.close, fd)
        self._fd = fd
        self.nbytes = nbytes
        self.label = label
        self._directory = directory
        try:
            self._mapping: mmap.mmap | None = _map(fd, nbytes)
        except BaseException:
            self._closing()  # the error's traceback holds `self`, and with it the descriptor
            raise

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        label: str = "region",
        reserved: bool = True,
    ) -> Region:
        """Make a region of ``nbytes`` zeros and reserve its memory now.

        It is anonymous memory, which the size of ``/dev/shm`` does not limit.

        Without a reservation the lack of memory would show later, as a SIGBUS in the process
        that touches a page first.

        Args:
            nbytes: Its size, at least 1.
            label: What it is called in messages.
            reserved: False to reserve nothing yet; then :meth:`reserve_part` comes before a part
                is touched.

        Raises:
            ConfigError: The size is no positive integer.
            OutOfSpace: There is not so much memory, or no descriptor left.
        """
        if type(nbytes) is not int or nbytes < 1:
            raise ConfigError(f"`nbytes` must be a positive integer, but is {nbytes!r}.")
        with telling_of_descriptors(f"region {label!r}"):
            fd = _anonymous(nbytes if reserved else 0, label)
            try:
                if reserved:
                    reserve(fd, nbytes, label, None)
                else:
                    os.ftruncate(fd, nbytes)
                # From now on nobody can pull the memory away from a reader.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(fd)
                raise
            return cls(fd, nbytes, label)

    @classmethod
    def attach(
        cls,
        fd: int,
        nbytes: int | None = None,
        *,
        label: str = "region",
        directory: Path | None = None,
    ) -> Region:
        """Map the region behind a descriptor, and take the descriptor over (even on failure).

        Args:
            fd: A descriptor of a region's file.
            nbytes: How much of it to map; None for all.
            label: What it is called in messages.
            directory: Where its file lies, for messages; None for memory.

        Raises:
            ConfigError: It is no file of ours, or smaller than ``nbytes``.
        """
        try:
            os.set_inheritable(fd, False)
            size = _checked_size(fd, nbytes, label)
        except BaseException:
            _close_quietly(fd)
            raise
        return cls(fd, size, label, directory)

    @classmethod
    def borrow(
        cls, pid: int, fd: int, nbytes: int | None = None, *, label: str = "region"
    ) -> Region:
        """Map the region that another process of this user holds as its descriptor ``fd``.

        Both numbers are the other's claim. Nothing is mapped but what :meth:`create` has made.

        Raises:
            PeerLost: There is no such process or descriptor, it is something else by now, or the
                kernel does not show it.
            ConfigError: ``pid`` or ``fd`` is no such number, or the region is smaller than
                ``nbytes``.
        """
        for name, number in (("pid", pid), ("fd", fd)):
            if type(number) is not int or number < 0:
                raise ConfigError(
                    f"`{name}` must be a number, 0 or more, for region {label!r}, "
                    f"but is {number!r}."
                )
        try:
            ours = _open_anonymous_of(pid, fd)
        except OSError as exc:
            raise PeerLost(
                f"Region {label!r} of process {pid} cannot be opened ({exc.strerror}). Both must "
                "be processes of one user that see each other."
            ) from exc
        if ours is None:
            raise PeerLost(
                f"Process {pid} does not hold region {label!r} as descriptor {fd}: that is "
                "something else."
            )
        return cls.attach(ours, nbytes, label=label)

    @property
    def fd(self) -> int:
        """The region's file descriptor, which stays the region's."""
        self._open_mapping()
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._mapping is None

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._open_mapping())

    def tensor(self, dtype: torch.dtype, num_elements: int, offset_bytes: int = 0) -> torch.Tensor:
        """Return a 1-D tensor over the region's memory; it keeps the memory alive.

        Args:
            dtype: Of the tensor.
            num_elements: Its length; 0 is allowed.
            offset_bytes: Where it begins, a multiple of 64.

        Raises:
            ConfigError: It begins elsewhere or reaches beyond the region's end.
            StateError: The region is closed.
        """
        mapping = self._open_mapping()
        if offset_bytes % ALIGN_BYTES or offset_bytes < 0:
            raise ConfigError(
                f"`offset_bytes` must be a multiple of {ALIGN_BYTES}, but is {offset_bytes!r}."
            )
        needed = offset_bytes + num_elements * dtype.itemsize
        if num_elements < 0 or needed > self.nbytes:
            raise ConfigError(
                f"`num_elements` must fit into the {self.nbytes} bytes of region {self.label!r}, "
                f"but {num_elements} elements of {dtype} from byte {offset_bytes} on "
                f"end at byte {needed}."
            )
        if num_elements == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with torch.inference_mode(False):  # else nobody could write to it outside of that mode
            return torch.frombuffer(mapping, dtype=dtype, count=num_elements, offset=offset_bytes)

    def reserve_part(self, start: int, nbytes: int) -> None:
        """Reserve the memory of a part of a region that was made without a reservation.

        Raises:
            OutOfSpace: There is not so much.
        """
        if nbytes:
            if self._directory is None:
                check_room(nbytes, self.label)
            reserve(self.fd, nbytes, self.label, self._directory, start=start)

    def release_part(self, start: int, nbytes: int) -> None:
        """Give the memory of a part back, as far as it is whole pages, which are zeros then."""
        first, stop = -(-start // mmap.PAGESIZE), (start + nbytes) // mmap.PAGESIZE
        if first < stop:
            pages = (first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE)
            self._open_mapping().madvise(mmap.MADV_REMOVE, *pages)

    def close(self) -> None:
        """Close the descriptor and forget the mapping; tensors handed out stay valid."""
        self._mapping = None
        self._closing()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"Region({self.label!r}, {self.nbytes} bytes{state})"

    def _open_mapping(self) -> mmap.mmap:
        mapping = self._mapping
        if mapping is None:
            raise StateError(f"Region {self.label!r} must be open, but is closed.")
        return mapping

    # --- on the way to another process ------------------------------------------------------------

    def send(self, connection: Connection) -> None:
        """Pass the region over ``multiprocessing.Pipe(duplex=True)``, for :meth:`receive`.

        Blocks: not, unless the pipe is full. Moves: 16 bytes and a file descriptor.

        Raises:
            PeerLost: The other end is closed.
        """
        header = _HEADER.pack(_HEADER_MAGIC, self.nbytes)
        with _as_socket(connection) as end:
            try:
                socket.send_fds(end, [header], [self.fd])
            except (BrokenPipeError, ConnectionResetError) as exc:
                raise _lost(f"could not be given region {self.label!r}") from exc

    @classmethod
    def receive(
        cls, connection: Connection, *, timeout_s: float = 30.0, label: str = "region"
    ) -> Region:
        """Take the region that the other end of ``connection`` sends.

        Raises:
            PeerTimeout: Nothing came in ``timeout_s`` seconds.
            PeerLost: The other end is closed.
            StateError: Something else was sent; it can still be received.

        Blocks: Until a region comes.
        """
        if not connection.poll(timeout_s):
            raise PeerTimeout(
                f"The other end of the connection did not send region {label!r} within "
                f"{timeout_s:g} s."
            )
        with _as_socket(connection) as end:
            fd, nbytes = _receive_fd(end, label)
        return cls.attach(fd, nbytes, label=label)


def _as_socket(connection: Connection) -> socket.socket:
    if not stat.S_ISSOCK(os.fstat(connection.fileno()).st_mode):
        raise ConfigError(
            "`connection` must be one end of `multiprocessing.Pipe(duplex=True)`, "
            "but is a pipe of one direction, which passes no regions."
        )
    end = socket.socket(fileno=os.dup(connection.fileno()))
    end.setblocking(True)
    return end


def _receive_fd(end: socket.socket, label: str) -> tuple[int, int]:
    """Read one header with its descriptor; leave anything else where it is."""
    try:
        head = end.recv(_HEADER.size, socket.MSG_PEEK)
        if head and not _HEADER_MAGIC.startswith(head[:8]):
            raise StateError(
                f"The other end of the connection sent something else than region {label!r}. Let "
                "`send` and `receive` stand in the same order on both ends."
            )
        header, fds, _, _ = socket.recv_fds(end, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as exc:
        raise _lost(f"did not send region {label!r}") from exc
    if len(header) == _HEADER.size and len(fds) == 1:
        return fds[0], _HEADER.unpack(header)[1]
    for fd in fds:
        os.close(fd)
    raise _lost(f"did not send all of region {label!r}")


def _lost(what: str) -> PeerLost:
    return PeerLost(f"The other end of the connection is closed and {what}.")


# --- files ----------------------------------------------------------------------------------------


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, trackfd=False)
    return mmap.mmap(fd, nbytes)


def check_room(nbytes: int, label: str) -> None:
    """Compare what is to be taken with the memory that is left.

    The kernel grants a reservation page by page and would rather kill a process than refuse one.

    Raises:
        OutOfSpace: There is not so much.
    """
    available = available_memory_bytes() if nbytes > _SMALL_BYTES else None
    if available is not None and nbytes > available:
        raise _out_of_space(nbytes, available, label, None)


def _anonymous(nbytes: int, label: str) -> int:
    """Return a descriptor of an anonymous file, once there seems to be memory for it."""
    check_room(nbytes, label)
    return os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _open_anonymous_of(pid: int, fd: int) -> int | None:
    """Open a region of another process; None if it is none, which is seen before it is opened."""
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{found}"
        if os.readlink(path) == f"/memfd:{_MEMFD_NAME} (deleted)":
            ours = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if fcntl.fcntl(ours, fcntl.F_GET_SEALS) == _SEALS:  # no file with a path has them
                return ours
            os.close(ours)
    finally:
        os.close(found)
    return None


@contextlib.contextmanager
def telling_of_descriptors(what: str) -> Iterator[None]:
    """Raise `OutOfSpace` where the body finds no descriptor left for ``what``."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in NO_DESCRIPTOR:
            raise
        raise OutOfSpace(
            f"No file descriptors are left for {what} ({exc.strerror}). Raise their limit "
            "(`ulimit -n`)."
        ) from exc


def reserve(
    fd: int, nbytes: int, label: str, directory: Path | str | None, *, start: int = 0
) -> None:
    """Have ``nbytes`` of a file backed by memory or disk from now on; it grows where it is shorter.

    Args:
        fd: The file.
        nbytes: How many.
        label: What is in it, for the error.
        directory: Where it lies, for the error; None for memory.
        start: Where in the file they begin.

    Raises:
        OutOfSpace: There is not so much.
    """
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as exc:
        if exc.errno not in _NO_SPACE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if exc.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
            raise OutOfSpace(
                f"Region {label!r} needs a file of {nbytes} bytes, but this process may "
                f"write at most {limit} to one. Raise that limit (`ulimit -f`).",
                nbytes,
                limit,
            ) from exc
        if directory is None:
            available = available_memory_bytes()
        else:
            found = os.statvfs(directory)
            available = found.f_bavail * found.f_frsize
        raise _out_of_space(nbytes, available, label, directory) from exc


def _out_of_space(
    needed: int, available: int | None, label: str, directory: Path | str | None
) -> OutOfSpace:
    where = "memory" if directory is None else f"{str(directory)!r}"
    free = "less is" if available is None else f"only {available} bytes are"
    if directory is None:
        way_out = "Use fewer worker processes, or a smaller model."
    else:
        way_out = "Make room there, or name a folder on another disk."
    return OutOfSpace(
        f"Region {label!r} needs {needed} bytes in {where}, but {free} free. {way_out}",
        needed,
        available,
    )


def _checked_size(fd: int, nbytes: int | None, label: str) -> int:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"`fd` must be a file of this user for region {label!r}, but {fd} is not."
        )
    size = found.st_size if nbytes is None else nbytes
    if not 0 < size <= found.st_size:
        raise ConfigError(
            f"`nbytes` must be within the file of region {label!r}, which has "
            f"{found.st_size} bytes, but is {size!r}."
        )
    return size


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return  # it was no descriptor at all, which is the error on its way to the caller
