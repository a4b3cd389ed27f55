"""A table on disk: `<name>.snapshot`, a file of ``torch.save``.

It is written next to the older one, synced, and takes its place: whole or not at all. What a writer
that died has left is overwritten by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.files import digest_of, sync_to_disk, written_whole
from phalanx.ipc import fail_point, try_lock, wait_until
from phalanx.tables.spec import TableSpec


def save_parts(spec: TableSpec, parts: list[Tensor], directory: Path, timeout_s: float) -> Path:
    """Write a table down in a folder, made where it is not there, and return the file.

    Raises:
        CheckpointError: The directory cannot be written to.
    """
    path = directory / f"{spec.name}.snapshot"
    content = {"table": spec.as_mapping(), "parts": parts, "digest": digest_of(parts)}
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            has_turn = partial(try_lock, directory.resolve(), folder, fcntl.LOCK_EX)
            if not wait_until(has_turn, timeout_s):
                raise OSError(f"another worker wrote a snapshot to it for {timeout_s:g} s")
            with written_whole(path) as draft:
                fail_point("snapshot begun")
                torch.save(content, draft)
                sync_to_disk(draft)
                fail_point("snapshot written")
            fail_point("snapshot renamed")
            os.fsync(folder)
        except (OSError, RuntimeError) as exc:  # torch says "RuntimeError" of a disk that is full
            reason = getattr(exc, "strerror", None) or exc
            raise CheckpointError(
                f"`directory` must be a folder that a snapshot can be written to, but is "
                f"{str(directory)!r} ({reason})."
            ) from exc
    return path


def load_parts(spec: TableSpec, directory: Path) -> list[Tensor]:
    """Read what :func:`save_parts` wrote for a table of this name.

    Raises:
        CheckpointError: It is missing, damaged, or of another shape, dtype or updater.
    """
    path = directory / f"{spec.name}.snapshot"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        table, parts = found["table"], list(found["parts"])
        # learning rates and the like may be others
        _refuse_other("updater", table["updater"]["name"], spec.updater.name)
        rows = len(parts[0]) if spec.has_keys else spec.rows
        kinds = [(part.dtype, tuple(part.shape)) for part in parts]
        _refuse_other("tensors", kinds, spec.parts(rows))
        if spec.has_keys:
            _refuse_other("number of different keys", len(parts[0].unique()), rows)
        _refuse_other("digest", digest_of(parts), found["digest"])
    except FileNotFoundError:
        raise CheckpointError(
            f"`directory` must hold a snapshot of table {spec.name!r}, but {str(path)!r} is not "
            "there. The table must have the name that it had then."
        ) from None
    except Exception as exc:  # of files, pickles and torch, or of what is not where it should be
        reason = str(exc).partition("\n")[0].partition(". ")[0] or repr(exc)
        raise CheckpointError(
            f"{str(path)!r} must be a snapshot of table {spec.name!r}, but is not: {reason}."
        ) from exc
    return parts


def _refuse_other(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise ValueError(f"its {what} must be {wanted!r}, but is {found!r}")
