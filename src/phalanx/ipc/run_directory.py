"""A place where the processes of one run find each other's regions by name.

    /dev/shm/phalanx-<uid>-<run>/     mode 0700, ours
        members                       every member holds a shared flock on it, until it is dead
        <name>.region                 bytes, then 64 that say what they are

The holder of the exclusive flock knows that no member is alive, and may remove everything: the last
one out does, or the first after a crash.

# Note [Joining while another sweeps]
Somebody may remove the directory between our opening it and our lock. So the file is compared, once
it is locked, with the one that the path leads to; if they differ we start again. The sweeper
removes `members` after all regions and before the directory: a process that makes a new `members`
in between has joined, and the directory, not being empty, stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from phalanx.errors import ConfigError, OutOfSpace, PeerTimeout, StateError
from phalanx.ipc.at_fork import register_at_fork
from phalanx.ipc.available_memory import lies_in_memory
from phalanx.ipc.liveness import Waiting
from phalanx.ipc.region import (
    NO_DESCRIPTOR,
    Region,
    aligned,
    check_room,
    reserve,
    telling_of_descriptors,
)

__all__ = ["RunDirectory"]

_BASE = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MEMBERS = "members"
_SUFFIX = ".region"
_OPEN_S = 10.0  # nobody holds the exclusive lock for longer than it takes to remove some files

# What ends a region's file: magic, version, size of the region. At the end, so that the bytes
# before begin on a page.
_SEAL = struct.Struct("<8sIxxxxQ40x")
_MAGIC = b"phlxrgn\n"
_VERSION = 1


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

    def __init__(self, path: Path, directory_fd: int, members_fd: int) -> None:
        """Take over both descriptors; not for callers, who have :meth:`join`."""
        self.path = path
        self._directory_fd = directory_fd
        self._members_fd = members_fd
        self._takes_memory = lies_in_memory(path.parent)
        register_at_fork(self.forget)

    @classmethod
    def join(cls, name: str, *, base: Path | str = _BASE) -> RunDirectory:
        """Become a member of the run ``name``, as its first or as one more.

        What crashed runs have left in ``base``, this one's predecessor or another's, is removed.

        Args:
            name: Letters, digits, `.`, `_` and `-`; at most 128; begins with a letter or digit.
            base: Where the directory is made. Elsewhere than in ``/dev/shm`` the regions are
                files of that disk.

        Raises:
            ConfigError: The name is none, or the directory cannot be trusted: it is a link,
                another user's, open to others, or holds files that are not ours.
            OutOfSpace: ``base`` is full, or there is no descriptor left.
        """
        path = Path(base) / f"{_prefix()}{_checked(name, 'name')}"
        what = f"run directory {str(path)!r}"
        with telling_of_descriptors(what):
            cls.sweep(base=base)
        waiting = Waiting(_OPEN_S)
        while True:
            _make_directory(path)
            with telling_of_descriptors(what):
                opened = _open_and_lock(path)
            if opened is not None:
                return cls(path, *opened)
            if waiting.over():
                raise PeerTimeout(
                    f"Run directory {str(path)!r} was locked or removed by others for "
                    f"{_OPEN_S:g} s. End the process that does it, or use another name."
                )
            waiting.rest()

    @staticmethod
    def sweep(*, base: Path | str = _BASE) -> list[str]:
        """Remove this user's run directories that have no living member; return their names.

        Directories that are not as :meth:`join` makes them are left alone.
        """
        swept = []
        for path in sorted(Path(base).glob(f"{_prefix()}*")):
            with suppress(ConfigError, OSError), _directory(path) as fd:
                if _remove_if_abandoned(path, fd):
                    swept.append(path.name.removeprefix(_prefix()))
        return swept

    @property
    def closed(self) -> bool:
        """Whether the membership has ended."""
        return self._members_fd < 0

    def open_region(
        self, name: str, nbytes: int, *, create: bool = True, reserved: int | None = None
    ) -> Region:
        """Return the region ``name`` of this run; all members get the same bytes, zeros at first.

        Args:
            name: As for :meth:`join`.
            nbytes: Its size, the same for all members.
            create: Whether to make it if nobody has.
            reserved: How many of its first bytes have memory from the beginning; None for all.
                :meth:`Region.reserve_part` gives others memory, before anybody touches them.

        Raises:
            ConfigError: There is such a region of another size, or a file that is no region.
            StateError: It is not there and ``create`` is False; this membership has ended; or the
                directory was removed.
            OutOfSpace: There is not so much room, or no descriptor left.
        """
        self._check_open()
        _checked(name, "name")
        if type(nbytes) is not int or nbytes < 1:
            raise ConfigError(f"`nbytes` must be a positive integer, but is {nbytes!r}.")
        with telling_of_descriptors(f"region {name!r}"):
            region = self._existing(name, nbytes)
            if region is None and create:
                self._check_there()
                region = self._new(name, nbytes, reserved) or self._existing(name, nbytes)
        if region is None:
            raise StateError(
                f"Region {name!r} must be made by a member of the run first, but is not there."
            )
        return region

    def _check_open(self) -> None:
        if self.closed:
            raise StateError(
                f"Run directory {self.path.name!r} must be joined by this process, but is closed. "
                "After a fork, call `RunDirectory.join` again."
            )

    def _check_there(self) -> None:
        if not _leads_to(self.path, self._directory_fd):
            raise StateError(
                f"Run directory {str(self.path)!r} was removed before its last member has left. "
                "What is open stays usable; for anything new, let all members leave, "
                "and join again."
            )

    def _existing(self, name: str, nbytes: int) -> Region | None:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name + _SUFFIX, flags, dir_fd=self._directory_fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno in NO_DESCRIPTOR:
                raise
            raise ConfigError(
                f"Region {name!r} must be a file of ours, but is not ({exc.strerror})."
            ) from exc
        try:
            _check_seal(fd, name, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return Region.attach(fd, nbytes, label=name, directory=self.path.parent)

    def _new(self, name: str, nbytes: int, reserved: int | None) -> Region | None:
        """Make a region without a name and name it when it is whole; None if another was first."""
        if self._takes_memory:
            check_room(nbytes if reserved is None else reserved, name)
        flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
        try:
            fd = os.open(".", flags, 0o600, dir_fd=self._directory_fd)
        except OSError as exc:
            _refuse_base(self.path.parent, exc)
        try:
            os.fchmod(fd, 0o600)
            end = _sealed_bytes(nbytes)
            reserve(fd, end if reserved is None else reserved, name, self.path.parent)
            os.ftruncate(fd, end)
            os.pwrite(fd, _SEAL.pack(_MAGIC, _VERSION, nbytes), end - _SEAL.size)
            os.link(
                f"/proc/self/fd/{fd}",
                name + _SUFFIX,
                dst_dir_fd=self._directory_fd,
                follow_symlinks=True,
            )
        except FileExistsError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return Region.attach(fd, nbytes, label=name, directory=self.path.parent)

    def close(self) -> None:
        """Leave the run; the last member removes the directory. Open regions stay usable."""
        if self.closed:
            return
        directory_fd, members_fd = self._directory_fd, self._members_fd
        self._directory_fd = self._members_fd = -1
        try:
            alone = _try_lock(members_fd, fcntl.LOCK_EX)
            if alone and _is_current(self.path, directory_fd, members_fd):
                _remove(self.path, directory_fd)
        except OSError as exc:
            if exc.errno not in NO_DESCRIPTOR:  # without one, it is left for the next `sweep`
                raise
        finally:
            os.close(members_fd)
            os.close(directory_fd)

    def forget(self) -> None:
        """Stop being a member in a forked child, which leaves the parent's membership alone."""
        if not self.closed:
            os.close(self._members_fd)
            os.close(self._directory_fd)
            self._directory_fd = self._members_fd = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r}{', closed' if self.closed else ''})"


def _prefix() -> str:
    return f"phalanx-{os.geteuid()}-"


def _checked(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"`{what}` must be 1 to 128 letters, digits, dots, dashes and underscores, with a "
            f"letter or digit first, but is {name!r}."
        )
    return name


# --- the directory --------------------------------------------------------------------------------


def _make_directory(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except OSError as exc:
        _refuse_base(path.parent, exc)


def _refuse_base(base: Path, exc: OSError) -> NoReturn:
    if exc.errno in NO_DESCRIPTOR:
        raise exc
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        raise OutOfSpace(
            f"No space is left in {str(base)!r}. Make room there, or give `base` a folder on "
            "another disk."
        ) from exc
    raise ConfigError(
        f"`base` must be a folder for temporary files of ours, but {str(base)!r} is not "
        f"({exc.strerror}). Give `base` another, on a local disk."
    ) from exc


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    """Open a run directory, if it is as we make them."""
    fd = _open_directory(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_directory(path: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except (NotADirectoryError, PermissionError) as exc:
        raise _untrusted(path, exc.strerror) from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _untrusted(path, "it is a link") from exc
        raise
    found = os.fstat(fd)
    mode = stat.S_IMODE(found.st_mode)
    # A base with the setgid bit hands it down; it opens the directory to nobody.
    if found.st_uid != os.geteuid() or mode & ~stat.S_ISGID != 0o700:
        os.close(fd)
        raise _untrusted(path, f"it is user {found.st_uid}'s, of mode {mode:#o}")
    return fd


def _untrusted(path: Path, why: str | None) -> ConfigError:
    return ConfigError(
        f"Run directory {str(path)!r} must be a directory of this user ({os.geteuid()}) and of "
        f"mode 0o700, but is not: {why}. Remove it, or use another name or `base`."
    )


def _open_and_lock(path: Path) -> tuple[int, int] | None:
    """Open and lock for a member; None if it went away meanwhile or somebody sweeps."""
    try:
        directory_fd = _open_directory(path)
    except FileNotFoundError:
        return None
    try:
        members_fd = _lock_members(path, directory_fd)
    except BaseException:
        os.close(directory_fd)
        raise
    if members_fd is None:
        os.close(directory_fd)
        return None
    return directory_fd, members_fd


def _lock_members(path: Path, directory_fd: int) -> int | None:
    # Looked at twice, as others may come and go during the first look.
    if _is_anothers(directory_fd) and _is_anothers(directory_fd):
        raise _untrusted(path, f"it holds files, but no `{_MEMBERS}`")
    fd = _open_members(path, directory_fd)
    if fd is None:
        return None
    try:
        if not _is_members(fd):
            raise _untrusted(path, f"its `{_MEMBERS}` is no empty file")
        # A lock cannot be turned from exclusive to shared in one step, hence the look afterwards.
        if _try_lock(fd, fcntl.LOCK_EX) and _is_current(path, directory_fd, fd):
            _remove_contents(directory_fd)
        if _try_lock(fd, fcntl.LOCK_SH) and _is_current(path, directory_fd, fd):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _open_members(path: Path, directory_fd: int) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(_MEMBERS, flags, 0o600, dir_fd=directory_fd)
    except FileNotFoundError:  # the directory itself was removed
        return None
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, *NO_DESCRIPTOR):
            _refuse_base(path.parent, exc)
        raise _untrusted(path, f"its `{_MEMBERS}`: {exc.strerror}") from exc


def _is_members(fd: int) -> bool:
    """Tell whether a file called `members` is one of ours, which are only locked."""
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_size == 0


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leads_to(path: Path | str, fd: int, directory_fd: int | None = None) -> bool:
    try:
        there = os.stat(path, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _is_current(path: Path, directory_fd: int, members_fd: int) -> bool:
    return _leads_to(path, directory_fd) and _leads_to(_MEMBERS, members_fd, directory_fd)


def _is_anothers(directory_fd: int) -> bool:
    """Tell whether there are files but no `members`, which ours have until last."""
    found = os.listdir(directory_fd)
    return bool(found) and _MEMBERS not in found


def _remove_if_abandoned(path: Path, directory_fd: int) -> bool:
    if _is_anothers(directory_fd):
        return False
    fd = _open_members(path, directory_fd)
    if fd is None:
        return False
    try:
        if not _is_members(fd):
            return False
        alone = _try_lock(fd, fcntl.LOCK_EX) and _is_current(path, directory_fd, fd)
        return alone and _remove(path, directory_fd)
    finally:
        os.close(fd)


def _remove(path: Path, directory_fd: int) -> bool:
    """Remove everything, under the exclusive lock; False if somebody joined at the last moment."""
    _remove_contents(directory_fd)
    os.unlink(_MEMBERS, dir_fd=directory_fd)
    try:
        os.rmdir(path)
    except OSError as exc:
        if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            return False
        raise
    return True


def _remove_contents(directory_fd: int) -> None:
    for name in os.listdir(directory_fd):
        if name == _MEMBERS:
            continue
        found = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(name, dir_fd=directory_fd)
        else:
            os.unlink(name, dir_fd=directory_fd)


# --- files of regions -----------------------------------------------------------------------------


def _sealed_bytes(nbytes: int) -> int:
    return aligned(nbytes) + _SEAL.size


def _check_seal(fd: int, name: str, nbytes: int) -> None:
    found = os.fstat(fd)
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or stat.S_IMODE(found.st_mode) != 0o600:
        raise ConfigError(
            f"Region {name!r} must be a file of this user and of mode 0o600, but is not."
        )
    seal = os.pread(fd, _SEAL.size, max(0, found.st_size - _SEAL.size))
    magic, version, size = _SEAL.unpack(seal) if len(seal) == _SEAL.size else (b"", 0, 0)
    if magic != _MAGIC or found.st_size != _sealed_bytes(size):
        raise ConfigError(f"Region {name!r} must be whole, but its file is damaged or another's.")
    if version != _VERSION:
        raise ConfigError(
            f"Region {name!r} must be of version {_VERSION}, but is of version {version}. Let all "
            "members use one version of Phalanx."
        )
    if size != nbytes:
        raise ConfigError(
            f"`nbytes` must be the size that region {name!r} was made with ({size}), "
            f"but is {nbytes!r}."
        )
