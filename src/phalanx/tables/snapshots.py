"""A table on disk: one file of tensors, and one of text that makes it count.

    <name>-<digest>.safetensors    values and states; written, synced, renamed
    <name>.json                    what it is, and which file of tensors; the last thing renamed

Until the text is renamed, the snapshot before it is the one that counts. A digest is of the
content, so two snapshots with the same content share a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.tables.spec import TableSpec

__all__ = ["load_parts", "save_parts"]

_VERSION = 1


def save_parts(spec: TableSpec, parts: list[Tensor], directory: Path) -> Path:
    """Write a table down, and return the file of text that names everything.

    Raises:
        CheckpointError: The directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        whole = directory / f".{spec.name}.{os.getpid()}.tmp"
        save_file(dict(zip(_part_names(spec), parts, strict=True)), whole)
        digest = _digest(whole)
        data = directory / f"{spec.name}-{digest[:16]}.safetensors"
        _sync(whole)
        os.replace(whole, data)
        text = {"version": _VERSION, "table": spec.as_mapping(), "file": data.name}
        manifest = directory / f"{spec.name}.json"
        draft = directory / f".{spec.name}.{os.getpid()}.json"
        draft.write_text(json.dumps({**text, "sha256": digest}, indent=1))
        _sync(draft)
        _sync(directory)
        os.replace(draft, manifest)
        _sync(directory)
    except OSError as exc:
        raise CheckpointError(
            f"`directory` must be a folder that a snapshot can be written to, but is "
            f"{str(directory)!r} ({exc.strerror or exc})."
        ) from exc
    _remove_older(directory, spec.name, data)
    return manifest


def _part_names(spec: TableSpec) -> list[str]:
    states = [f"state {i}" for i in range(len(spec.updater.states))]
    return [*(["keys"] if spec.has_keys else []), "values", *states]


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
    manifest = directory / f"{spec.name}.json"
    try:
        found = json.loads(manifest.read_text())
        data = directory / Path(found["file"]).name
        theirs, digest, version = found["table"], found["sha256"], found["version"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(
            f"{str(manifest)!r} must describe a snapshot of table {spec.name!r}, but does not "
            f"({exc})."
        ) from exc
    if version != _VERSION:
        raise CheckpointError(
            f"{str(manifest)!r} must be of version {_VERSION}, but is of {version!r}."
        )
    _refuse_other(spec, theirs, manifest)
    return _read_parts(spec, data, digest)


def _refuse_other(spec: TableSpec, theirs: object, manifest: Path) -> None:
    if not isinstance(theirs, dict):
        raise CheckpointError(f"{str(manifest)!r} must describe a table, but does not.")
    updater = theirs.get("updater")
    found = {
        "shape": theirs.get("shape"),
        "dtype": theirs.get("dtype"),
        "updater": updater.get("name") if isinstance(updater, dict) else updater,
    }
    ours = spec.as_mapping()
    wanted = {
        "shape": ours["shape"],
        "dtype": ours["dtype"],
        "updater": spec.updater.options()["name"],
    }
    for field, value in wanted.items():  # learning rates and the like may be others
        if found[field] != value:
            raise CheckpointError(
                f"`{field}` of the snapshot {str(manifest)!r} must be that of table "
                f"{spec.name!r} ({value!r}), but is {found[field]!r}."
            )


def _read_parts(spec: TableSpec, data: Path, digest: str) -> list[Tensor]:
    try:
        if _digest(data) != digest:
            raise CheckpointError(f"{str(data)!r} must be as it was written, but is damaged.")
        tensors = load_file(data)
        parts = [tensors[name] for name in _part_names(spec)]
    except (OSError, SafetensorError, KeyError) as exc:
        raise CheckpointError(
            f"{str(data)!r} must hold the tensors of table {spec.name!r}, but does not ({exc})."
        ) from exc
    values = parts[int(spec.has_keys)]
    shape = (len(parts[0]) if spec.has_keys else spec.rows, spec.cols)
    if values.shape != shape or values.dtype != spec.dtype:
        raise CheckpointError(
            f"{str(data)!r} must hold {spec.dtype}, {shape}, but holds "
            f"{values.dtype}, {tuple(values.shape)}."
        )
    return parts


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
