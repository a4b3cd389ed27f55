"""Read files whose names come from outside: regular ones only, without waiting, up to a size.
Write files whole or not at all, and files of tensors as other files are written.

A pipe where a file is expected would be waited for without end, a device may have none, and opening
some devices does something. What is no regular file is refused before it is opened. A new file
removes what lies in its place, and is never written through it: a link would lead elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "open_new",
    "open_regular",
    "read_text",
    "save_tensors",
    "sync_to_disk",
    "written_whole",
]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, to read its bytes.

    Raises:
        OSError: It is missing, unreadable, or no regular file.
        ValueError: ``path`` can be no path.
    """
    _refuse_special(os.stat(path))
    # It may be another by now, so the open itself must not wait either.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_special(os.fstat(fd))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_text(path: Path, *, max_bytes: int) -> str:
    """Read a regular file of UTF-8.

    Raises:
        OSError: As :func:`open_regular`, or it is longer than ``max_bytes``.
        ValueError: It is no UTF-8, or ``path`` can be no path.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"it is longer than {max_bytes} bytes")
    return content.decode("utf-8")


def open_new(path: Path) -> BufferedWriter:
    """Make a new file, in the place of a file, link or pipe that lies there, and open it to write.

    Raises:
        OSError: It cannot be made, or a folder lies there.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file of safetensors, of the mode that the user's umask gives to any new file.

    Raises:
        OSError: It cannot be written.
        SafetensorError: The same, as safetensors says it.
        ValueError: A tensor cannot be stored.
    """
    from safetensors.torch import save_file  # needs torch, which who reads a file does without

    with open_new(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)  # safetensors makes files that only their owner may read


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield where to write; at the end that file takes the place of ``path``, whole or not at all.

    One process writes to ``path`` at a time. What one that was killed has left, or whatever else
    lies there, is removed first.
    """
    draft = path.with_name(path.name + ".new")
    open_new(draft).close()  # so that what the caller opens is a file of ours
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Make the kernel write a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_special(found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(f"it is {_KINDS.get(kind, 'something else')} and not a regular file")
