"""A table on disk: one file of tensors, and one of text that makes it count.

    <name>-<digest>.safetensors    values and states; written, synced, renamed
    <name>.json                    what it is, and which file of tensors; the last thing renamed

Until the text is renamed, the snapshot before it is the one that counts. A digest is of the
content, so two snapshots with the same content share a file.

    .<name>.<process>.<thread>.tmp    a file of tensors that is being written

Its writer holds a lock on it, so one without a lock was left by a writer that died; whoever writes
next removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.files import open_new, open_regular, read_text, sync_to_disk, written_whole
from phalanx.ipc import fail_point
from phalanx.plan import check_argument
from phalanx.tables.spec import TableSpec
from phalanx.tables.updaters import state_dtype

__all__ = [
    "SNAPSHOT_POINTS",
    "check_place",
    "load_parts",
    "manifest_in",
    "read_directory",
    "save_parts",
]

SNAPSHOT_POINTS = ("snapshot half written", "snapshot written", "snapshot renamed")
"""Fail points of a snapshot, in order; it counts after the last one."""

Bytes = NDArray[np.uint8]

_VERSION = 1
_MANIFEST_KEYS = {"version", "table", "file", "sha256"}
_MOST_MANIFEST_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20  # hashed while it is still in the processor's caches
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
}


def read_directory(given: object) -> Path:
    """Return the folder that a user named.

    Raises:
        ConfigError: It is neither a string nor a path.
    """
    check_argument(isinstance(given, str | os.PathLike), "directory", "be a path", given)
    return Path(given)  # type: ignore[arg-type]


def manifest_in(directory: Path, name: str) -> Path:
    """Return the file of text that makes a table's snapshot count."""
    return directory / f"{name}.json"


def check_place(directory: Path, name: str) -> None:
    """Make the folder, and see that a snapshot of the table would overwrite nothing else.

    Raises:
        CheckpointError: It cannot be made, or another file has the snapshot's name.
    """
    with _explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
    _refuse_other_file(manifest_in(directory, name), name)


def save_parts(spec: TableSpec, parts: list[Tensor], directory: Path) -> Path:
    """Write a table down, and return the file of text that names everything.

    Raises:
        CheckpointError: The directory cannot be written to, or another file has its name.
    """
    check_place(directory, spec.name)
    manifest = manifest_in(directory, spec.name)
    draft = directory / f".{spec.name}.{os.getpid()}.{threading.get_ident()}.tmp"
    with _explained(directory):
        with _alone_in(directory):
            _remove_left_drafts(directory, spec.name)
            file = open_new(draft)
            fcntl.flock(file, fcntl.LOCK_EX)
        with file:  # and its lock, until it has its name
            try:
                digest = _write(file, dict(zip(_part_names(spec), parts, strict=True)))
                fail_point("snapshot written")
                data = directory / f"{spec.name}-{digest[:16]}.safetensors"
                text = {"version": _VERSION, "table": spec.as_mapping(), "file": data.name}
                # Another's clearing up must not come between the two files.
                with _alone_in(directory):
                    _refuse_other_file(manifest, spec.name)
                    os.replace(draft, data)
                    sync_to_disk(directory)
                    fail_point("snapshot renamed")
                    with written_whole(manifest) as new:
                        new.write_text(json.dumps({**text, "sha256": digest}, indent=1))
                        sync_to_disk(new)
                    sync_to_disk(directory)
                    _remove_older(directory, spec.name, data)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
    return manifest


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise CheckpointError(
            f"`directory` must be a folder that a snapshot can be written to, but is "
            f"{str(directory)!r} ({exc.strerror or exc})."
        ) from exc


def _refuse_other_file(manifest: Path, name: str) -> None:
    """Refuse to overwrite what no snapshot has written: a user's file may have the same name."""
    try:
        found = json.loads(read_text(manifest, max_bytes=_MOST_MANIFEST_BYTES))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found.keys() >= _MANIFEST_KEYS:
        raise CheckpointError(
            f"{str(manifest)!r} must be a snapshot of table {name!r} where one is written, but is "
            "another file, and is left as it is. Name another `directory`, or move the file away."
        )


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold the folder against other workers that write a snapshot to it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _part_names(spec: TableSpec) -> list[str]:
    states = [f"state {i}" for i in range(len(spec.updater.states))]
    return [*(["keys"] if spec.has_keys else []), "values", *states]


def _write(file: BufferedWriter, parts: dict[str, Tensor]) -> str:
    """Write a file of tensors, synced, and return its digest.

    ``save_file`` would copy everything first, and the digest would read it back.
    """
    digest = hashlib.sha256()
    for piece in _pieces(parts):
        for start in range(0, len(piece), _BLOCK_BYTES):
            block = piece[start : start + _BLOCK_BYTES].data
            file.write(block)
            digest.update(block)
            fail_point("snapshot half written")
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest()


def _pieces(parts: dict[str, Tensor]) -> Iterator[Bytes]:
    """Yield the bytes of a file of safetensors: length of the header, header, tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)
    for part in parts.values():
        yield part.reshape(-1).view(torch.uint8).numpy()


def _remove_left_drafts(directory: Path, name: str) -> None:
    """Remove what writers that died have left; the folder is held, so none is about to lock."""
    draft = re.compile(re.escape(f".{name}.") + r"\d+\.\d+\.tmp")
    for entry in os.scandir(directory):
        if draft.fullmatch(entry.name) is None or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # somebody else did, or it is locked: its writer lives
            fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(fd)


def _remove_older(directory: Path, name: str, kept: Path) -> None:
    for file in directory.glob(f"{name}-{'[0-9a-f]' * 16}.safetensors"):
        if file != kept:
            with contextlib.suppress(OSError):  # somebody else did, or reads it
                file.unlink()


def load_parts(spec: TableSpec, directory: Path) -> list[Tensor]:
    """Read what :func:`save_parts` wrote for a table of this name.

    Raises:
        CheckpointError: It is missing, damaged, or of another shape, dtype or updater.
    """
    found = _read_manifest(spec, directory)
    while True:
        try:
            return _read_parts(spec, *found)
        except CheckpointError:
            before, found = found, _read_manifest(spec, directory)
            if found == before:  # else somebody has replaced the snapshot meanwhile
                raise


def _read_manifest(spec: TableSpec, directory: Path) -> tuple[Path, str]:
    """Return where the tensors of a table's snapshot are, and their digest."""
    manifest = manifest_in(directory, spec.name)
    try:
        found = json.loads(read_text(manifest, max_bytes=_MOST_MANIFEST_BYTES))
        data = directory / Path(found["file"]).name  # never elsewhere
        theirs, digest, version = found["table"], str(found["sha256"]), found["version"]
    except FileNotFoundError:
        raise CheckpointError(
            f"`directory` must hold a snapshot of table {spec.name!r}, but {str(manifest)!r} is "
            f"not there. The table must have the name that it had then."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CheckpointError(
            f"{str(manifest)!r} must describe a snapshot of table {spec.name!r}, but does not "
            f"({exc})."
        ) from exc
    if version != _VERSION:
        raise CheckpointError(
            f"{str(manifest)!r} must be of version {_VERSION}, but is of {version!r}."
        )
    _refuse_other(spec, theirs, manifest)
    return data, digest


def _refuse_other(spec: TableSpec, theirs: object, manifest: Path) -> None:
    if not isinstance(theirs, dict):
        raise CheckpointError(f"{str(manifest)!r} must describe a table, but does not.")
    for field in ("shape", "dtype", "updater"):
        found, wanted = theirs.get(field), spec.as_mapping()[field]
        if field == "updater":  # learning rates and the like may be others
            found, wanted = (u.get("name") if isinstance(u, dict) else u for u in (found, wanted))
        if found != wanted:
            raise CheckpointError(
                f"`{field}` of the snapshot {str(manifest)!r} must be that of table "
                f"{spec.name!r} ({wanted!r}), but is {found!r}."
            )


def _read_parts(spec: TableSpec, data: Path, digest: str) -> list[Tensor]:
    try:
        with open_regular(data) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise CheckpointError(f"{str(data)!r} must be as it was written, but is damaged.")
            # The open file, and not whatever has its name by now.
            tensors = load_file(f"/proc/self/fd/{file.fileno()}")
        parts = [tensors[name] for name in _part_names(spec)]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"{str(data)!r} must hold the tensors of table {spec.name!r}, but does not ({exc})."
        ) from exc
    _check_parts(spec, parts, data)
    return parts


def _check_parts(spec: TableSpec, parts: list[Tensor], data: Path) -> None:
    """Refuse tensors of another shape or dtype than the table's, and keys that stand twice."""
    rows = parts[0].numel() if spec.has_keys else spec.rows
    wanted: list[tuple[tuple[int, ...], torch.dtype]] = []
    if spec.has_keys:
        wanted.append(((rows,), torch.int64))
    wanted.append(((rows, spec.cols), spec.dtype))
    for kind in spec.updater.states:
        wanted.append(((rows, spec.cols if kind == "element" else 1), state_dtype(spec.dtype)))
    for name, part, (shape, dtype) in zip(_part_names(spec), parts, wanted, strict=True):
        if tuple(part.shape) != shape or part.dtype != dtype:
            raise CheckpointError(
                f"{str(data)!r} must hold {name} as {dtype}, {shape}, but holds {part.dtype}, "
                f"{tuple(part.shape)}."
            )
    if spec.has_keys and len(parts[0].unique()) != rows:
        raise CheckpointError(
            f"{str(data)!r} must hold each key once, but holds {rows - len(parts[0].unique())} "
            "more."
        )
