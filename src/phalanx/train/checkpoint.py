"""A trainer's state on disk: safetensors for tensors, JSON for the rest, no code.

    DIR/checkpoint.json         position, options, optimizer's groups, scheduler, a digest of each
    file below DIR/model.safetensors       the module's state dict, under the unwrapped module's
    keys DIR/optimizer.safetensors   the optimizer's state tensors
    DIR/order.safetensors       the generators that decide the data's order
    DIR/metrics.safetensors     what the running epoch's metrics have counted

A checkpoint is written into a folder beside DIR, synced, and renamed; DIR is the old one or the new
one, never half of each. A crash between the two renames leaves the old one as DIR.previous, which
is read then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError, PhalanxError, UnsupportedError

__all__ = ["Stored", "load_stored", "pack_state", "save_stored", "unpack_like"]

_FORMAT = 1
_DOCUMENT = "checkpoint.json"
_DAMAGES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)


@dataclass
class Stored:
    """What one checkpoint holds.

    Attributes:
        tensors: By file (without suffix) and name.
        values: Everything else, as JSON can hold it.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def save_stored(stored: Stored, folder: Path) -> None:
    """Write ``stored`` to ``folder``, replacing what is there as a whole.

    Raises:
        ConfigError: ``folder`` holds something else, or is where this process stands.
        CheckpointError: It cannot be written: no room, no permission, or another trainer writes it.
        UnsupportedError: safetensors has no such dtype.
    """
    with _trouble_named(folder):
        folder = Path(os.path.realpath(folder))  # a link to a folder stays a link
        names = {_DOCUMENT, *(f"{name}.safetensors" for name in stored.tensors)}
        _check_place(folder, names)
        with _draft(folder) as fresh:
            _write(stored, fresh)
            _put_in_place(fresh, folder)


def _check_place(folder: Path, names: Collection[str]) -> None:
    """Refuse a folder that may not be replaced by one with files of these ``names``."""
    if not os.path.lexists(folder):
        return
    others = sorted({path.name for path in folder.iterdir()} - set(names))
    if others:
        raise ConfigError(
            f"`folder` must be new, empty or a checkpoint, but `{folder}` holds other files, such "
            f"as {others[0]!r}. Give a folder of the checkpoint's own."
        )
    if os.path.samefile(folder, os.curdir):
        raise ConfigError(
            f"`folder` must be one that can be replaced as a whole, but `{folder}` is the current "
            "directory. Give a folder below it."
        )


def _write(stored: Stored, fresh: Path) -> None:
    """Write all files to the empty folder ``fresh``; they are on the disk afterwards."""
    digests = {}
    for name, tensors in stored.tensors.items():
        file = fresh / f"{name}.safetensors"
        try:
            safetensors.torch.save_file({k: _own(v) for k, v in tensors.items()}, file)
        except (KeyError, ValueError) as error:
            raise UnsupportedError(
                f"Tensors of `{name}` must be of a dtype that safetensors can store, but one is "
                f"not: {error}. Train in another dtype."
            ) from error
        digests[file.name] = _digest(file)
        _sync(file)
    document = {"format": _FORMAT, "files": digests, **stored.values}
    text = json.dumps({"digest": _digest_of(document), "content": document}, indent=1)
    (fresh / _DOCUMENT).write_text(text, encoding="utf-8")
    _sync(fresh / _DOCUMENT)
    _sync(fresh)


def _put_in_place(fresh: Path, folder: Path) -> None:
    previous = folder.with_name(folder.name + ".previous")
    if folder.exists():
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    fresh.rename(folder)
    _sync(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Make an empty folder beside ``folder``, for us alone; it is gone if the body fails."""
    fresh = folder.with_name(folder.name + ".writing")
    fresh.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, fresh, folder)
        for left in fresh.iterdir():  # by one that was killed
            left.unlink()
        try:
            yield fresh
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, fresh: Path, folder: Path) -> None:
    """Hold ``fresh`` against other processes, where its file system knows of locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = False
    except OSError as error:  # others than these: nothing can be locked here
        taken = isinstance(error, BlockingIOError)
    # Else somebody has put it in its place between our two calls.
    if taken or not fresh.exists() or not os.path.samestat(os.fstat(descriptor), fresh.stat()):
        raise CheckpointError(
            f"`folder` must be written by one trainer at a time, but another is writing "
            f"`{folder}`. Give each a folder of its own."
        )


@contextlib.contextmanager
def _trouble_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except PhalanxError:
        raise
    except (OSError, ValueError, SafetensorError) as error:  # a ValueError: no path at all
        raise CheckpointError(
            f"`folder` must be a place that a checkpoint can be written to, but is "
            f"{str(folder)!r}: {error}. The checkpoint before, if any, is as it was. Make room "
            "and see to the permissions, or give another folder."
        ) from error


def load_stored(folder: Path) -> Stored:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of a format that this version does not read.
    """
    with _damage_named(folder):
        folder = Path(os.path.realpath(folder))
        previous = folder.with_name(folder.name + ".previous")
        if not (folder / _DOCUMENT).exists() and (previous / _DOCUMENT).exists():
            folder = previous
    with _damage_named(folder / _DOCUMENT):
        sealed = json.loads((folder / _DOCUMENT).read_text(encoding="utf-8"))
        document = sealed["content"]
        if sealed["digest"] != _digest_of(document):
            raise ValueError("its digest differs from the one that was written")
        files = dict(document.pop("files"))
        version = document.pop("format")
    if version != _FORMAT:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of format {_FORMAT}, but is of format {version!r}. "
            "Read it with the version of Phalanx that wrote it."
        )
    stored = Stored(values=document)
    for name, digest in files.items():
        with _damage_named(folder / name):
            if _digest(folder / name) != digest:
                raise ValueError("its digest differs from the one that was written")
            mapped = safetensors.torch.load_file(folder / name)
            # Copied: who writes to the file later, or unplugs its disk, must not change our state.
            stored.tensors[Path(name).stem] = {k: v.clone() for k, v in mapped.items()}
    return stored


def pack_state(state: object) -> Any:
    """Return a scheduler's or optimizer's plain state as JSON can hold it.

    Mappings become lists of pairs, so that keys keep their type.
    """
    if isinstance(state, Mapping):
        return {"pairs": [[pack_state(k), pack_state(v)] for k, v in state.items()]}
    if isinstance(state, (list, tuple)):
        return [pack_state(value) for value in state]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise CheckpointError(
        f"A checkpoint must hold plain values, but {type(state).__name__} {state!r} is none. Use a "
        "scheduler or an optimizer whose state is numbers, strings, lists and dicts."
    )


def unpack_like(packed: Any, like: object) -> Any:
    """Undo :func:`pack_state`; tuples and counters come back where ``like`` has them."""
    if isinstance(packed, dict):
        source = like if isinstance(like, Mapping) else {}
        pairs = {k: unpack_like(v, source.get(k)) for k, v in packed["pairs"]}
        return Counter(pairs) if isinstance(like, Counter) else pairs
    if isinstance(packed, list):
        likes = (
            like
            if isinstance(like, (list, tuple)) and len(like) == len(packed)
            else [None] * len(packed)
        )
        values = [unpack_like(value, each) for value, each in zip(packed, likes, strict=True)]
        return tuple(values) if isinstance(like, tuple) else values
    return packed


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGES as error:
        raise CheckpointError(
            f"Checkpoint file `{path}` must be readable and whole, but is not: {error}. Give a "
            "folder that `save()` has written."
        ) from error


def _own(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in plain memory of its own, as safetensors wants it."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _digest_of(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Make the kernel write a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
