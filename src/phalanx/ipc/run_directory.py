"""A place where the processes of one run find each other's regions by name.

    /dev/shm/phalanx-run-<uid>-<run>/     mode 0700, ours
        <name>.region                     the bytes of a region

Every member holds a shared flock on the directory until it is dead. The holder of the exclusive
flock knows that no member is alive, and may remove everything: the last one out does, or the first
after a crash. Somebody may remove the directory between our opening it and our lock. So it is
compared, once it is locked, with what the path leads to; if they differ we start again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from phalanx.errors import ConfigError, PeerTimeout, StateError
from phalanx.ipc.forks import register_at_fork
from phalanx.ipc.liveness import Waiting
from phalanx.ipc.region import Region, reserve

_BASE = Path("/dev/shm")
_OPEN_S = 10.0  # nobody holds the exclusive lock for longer than it takes to remove some files


class RunDirectory:
    """Membership in a run on this machine; made by :meth:`join`.

    A forked child is not a member: it calls :meth:`join` itself.

    Attributes:
        path: Where the directory lies.

    Example:
        >>> with RunDirectory.join(f"example-{os.getpid()}") as run:
        ...     ours = run.open_region("weights", 1024)
        ...     theirs = run.open_region("weights", 1024, create=False)
        >>> ours.buffer[3] = 7
        >>> theirs.buffer[3], run.path.exists()
        (7, False)
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over the directory's descriptor; not for callers, who have :meth:`join`."""
        self.path = path
        self._fd = fd
        self._leaving = weakref.finalize(self, _leave, path, fd)
        register_at_fork(self.forget)

    @classmethod
    def join(cls, name: str, *, base: Path | str = _BASE) -> RunDirectory:
        """Become a member of the run ``name``, as its first or as one more.

        What crashed runs have left in ``base``, this one's predecessor or another's, is removed.

        Args:
            name: Of a folder.
            base: Where the directory is made.

        Raises:
            ConfigError: The directory is another user's, or open to others.
        """
        path = Path(base) / f"{_prefix()}{name}"
        waiting = Waiting(_OPEN_S)
        cls.sweep(base=base)
        while (fd := _become_member(path)) is None:
            if waiting.over():
                raise PeerTimeout(
                    f"Run directory {str(path)!r} was locked or removed by others for "
                    f"{_OPEN_S:g} s. End the process that does it, or use another name."
                )
            waiting.rest()
        return cls(path, fd)

    @staticmethod
    def sweep(*, base: Path | str = _BASE) -> list[str]:
        """Remove this user's run directories that have no living member; return their names.

        Directories that are not as :meth:`join` makes them are left alone.
        """
        swept = []
        for path in sorted(Path(base).glob(f"{_prefix()}*")):
            with suppress(ConfigError, OSError):
                fd = _open_directory(path)
                try:
                    if _remove_if_alone(path, fd):
                        swept.append(path.name.removeprefix(_prefix()))
                finally:
                    os.close(fd)
        return swept

    def open_region(
        self, name: str, nbytes: int, *, create: bool = True, reserved: int | None = None
    ) -> Region:
        """Return the region ``name`` of this run; all members get the same bytes, zeros at first.

        Args:
            name: Of a file.
            nbytes: Its size, the same for all members.
            create: Whether to make it if it does not exist.
            reserved: How many of its first bytes have memory from the beginning; None for all.
                :meth:`Region.reserve_part` gives others memory, before anybody touches them.

        Raises:
            StateError: It is not there and ``create`` is False.
            OutOfSpace: There is not so much room.
        """
        directory = self.path.parent
        file = f"{name}.region"
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._fd)
            return Region(fd, name, directory)
        except FileNotFoundError:
            if not create:
                raise StateError(
                    f"Region {name!r} must be made by a member of the run first, but is not there."
                ) from None
        # Named when it is whole; if another one was first, it is this one's as well.
        fd = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            reserve(fd, nbytes if reserved is None else reserved, name, directory)
            os.ftruncate(fd, nbytes)
            os.link(f"/proc/self/fd/{fd}", file, dst_dir_fd=self._fd, follow_symlinks=True)
        except BaseException as exc:
            os.close(fd)
            if isinstance(exc, FileExistsError):
                return self.open_region(name, nbytes, create=False)
            raise
        return Region(fd, name, directory)

    def close(self) -> None:
        """Leave the run; the last member removes the directory. Open regions stay usable.

        The end of the interpreter does so, too.
        """
        self._leaving()

    def forget(self) -> None:
        """Stop being a member in a forked child, which leaves the parent's membership alone."""
        if self._leaving.detach():
            os.close(self._fd)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class OwnRegions:
    """The regions of one process alone, by name; used as a :class:`RunDirectory` is."""

    def __init__(self) -> None:
        self._found: dict[str, Region] = {}
        self._mutex = threading.Lock()

    def open_region(
        self, name: str, nbytes: int, *, create: bool = True, reserved: int | None = None
    ) -> Region:
        """Return the region of that name; see :meth:`RunDirectory.open_region`."""
        with self._mutex:
            if name not in self._found:
                if not create:
                    raise StateError(f"Region {name!r} must be made first, but is not there.")
                self._found[name] = Region.create(nbytes, label=name, reserved=reserved)
            return self._found[name]

    def close(self) -> None:
        """Let go of all regions."""
        self._found.clear()


Regions = RunDirectory | OwnRegions


def _prefix() -> str:
    return f"phalanx-run-{os.geteuid()}-"


# --- the directory --------------------------------------------------------------------------------


def _leave(path: Path, fd: int) -> None:
    with suppress(OSError):  # then it is left for the next `sweep`
        _remove_if_alone(path, fd)
    os.close(fd)


def _become_member(path: Path) -> int | None:
    """Return the directory's descriptor, locked; None where others sweep or remove it."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        fd = _open_directory(path)
    except FileNotFoundError:
        return None
    if try_lock(path, fd, fcntl.LOCK_SH):
        return fd
    os.close(fd)
    return None


def _open_directory(path: Path) -> int:
    """Open a run directory, if it is as we make them."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(fd)
        raise ConfigError(
            f"Run directory {str(path)!r} must be a directory of this user ({os.geteuid()}) and of "
            f"mode 0o700, but is user {found.st_uid}'s, of mode {found.st_mode & 0o777:#o}. Remove "
            "it, or use another name or `base`."
        )
    return fd


def try_lock(path: Path, fd: int, kind: int) -> bool:
    """Lock a directory, if no other process has; tell so, and that the path leads to it still."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _leads_to(path, fd)


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_if_alone(path: Path, fd: int) -> bool:
    """Remove a directory that has no member but us; tell whether it had none."""
    is_alone = try_lock(path, fd, fcntl.LOCK_EX)
    if is_alone:
        shutil.rmtree(path)
    return is_alone
