"""Write files whole or not at all, and files of tensors as other files are written."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["digest_of", "save_tensors", "sync_to_disk", "written_whole"]


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

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)  # safetensors makes files that only their owner may read


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the bytes of tensors on the CPU, one after the other."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield where to write; at the end that file takes the place of ``path``, whole or not at all.

    One process writes to ``path`` at a time. The draft of one that was killed is removed first.
    """
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
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
