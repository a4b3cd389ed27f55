"""A trainer's state on disk: safetensors for tensors, JSON for the rest, no code.

    DIR/checkpoint.json         position, options, optimizer's groups, scheduler, all files' digests
    DIR/model.safetensors       the module's state dict, under the unwrapped module's keys
    DIR/buffers.safetensors     buffers that training writes and no state dict has
    DIR/optimizer.safetensors   the optimizer's state tensors
    DIR/order.safetensors       the generators that decide the data's order
    DIR/metrics.safetensors     what the running epoch's metrics have counted

safetensors has no complex128: such tensors are stored as pairs of float64, and listed in the JSON.

A checkpoint is written into a folder beside DIR, synced, and renamed; DIR is the old one or the new
one, never half of each. A crash between the two renames leaves the old one as DIR.previous, which
is read then. Removed are files that we write, and no others: not from DIR, nor from DIR.writing and
DIR.previous beside it, where a link is not followed either.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError, PhalanxError, UnsupportedError
from phalanx.files import open_regular, read_text, save_tensors, sync_to_disk

__all__ = ["Stored", "check_packed", "load_stored", "pack_state", "save_stored", "unpack_like"]

_FORMAT = 1
_DOCUMENT = "checkpoint.json"
_MOST_DOCUMENT_BYTES = 1 << 28  # ten bytes for each parameter of twenty million
_MOST_PACKED = 1 << 12  # elements of a tensor that goes into the JSON
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.bool, torch.uint8, torch.int32, torch.int64),
    )
}
_DRAFT_NAME = re.compile(
    r"\.tmp[A-Za-z0-9]{6}"
)  # safetensors writes to such a file, and renames it
_FILE_NAME = re.compile(r"[a-z_]{1,100}\.safetensors")
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
        ConfigError: ``folder`` holds something else, or is where this process stands; or what
            saving needs beside it, ``folder.writing`` and ``folder.previous``, does.
        CheckpointError: It cannot be written: no room, no permission, or another trainer writes it.
        UnsupportedError: safetensors has no such dtype.
    """
    with _trouble_named(folder):
        folder = Path(os.path.realpath(folder))  # a link to a folder stays a link
        names = {_DOCUMENT, *(f"{name}.safetensors" for name in stored.tensors)}
        _check_place(folder, names)
        with _draft(folder, names) as fresh:
            _check_previous(_previous(folder), names)
            _write(stored, fresh)
            _put_in_place(fresh, folder)


def _check_place(folder: Path, names: Collection[str]) -> None:
    """Refuse a folder that may not be replaced by one with files of these ``names``."""
    if not os.path.lexists(folder):
        return
    others = _others_in(folder, names)
    if others:
        raise ConfigError(
            f"`folder` must be new, empty or a checkpoint, but `{folder}` holds other files, such "
            f"as {others[0]!r}. Give a folder of the checkpoint's own."
        )
    if any(folder.iterdir()) and not os.path.lexists(folder / _DOCUMENT):
        raise ConfigError(
            f"`folder` must be new, empty or a checkpoint, but `{folder}` holds files and no "
            f"{_DOCUMENT}. Give a folder of the checkpoint's own."
        )
    if os.path.samefile(folder, os.curdir):
        raise ConfigError(
            f"`folder` must be one that can be replaced as a whole, but `{folder}` is the current "
            "directory. Give a folder below it."
        )


def _check_previous(previous: Path, names: Collection[str]) -> None:
    if previous.is_symlink():
        _refuse_beside(previous, "is a link")
    if previous.exists() and (others := _others_in(previous, names)):
        _refuse_beside(previous, f"holds other files, such as {others[0]!r}")


def _refuse_beside(path: Path, found: str) -> NoReturn:
    raise ConfigError(
        f"`folder` must leave room beside it for a draft and for the checkpoint before, but "
        f"`{path}` {found}. Move that away, or give another folder."
    )


def _others_in(folder: Path | int, names: Collection[str]) -> list[str]:
    """Name what lies in a folder and is no file, or link, of one of these ``names``."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name not in names or entry.is_dir(follow_symlinks=False)
        )


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _write(stored: Stored, fresh: Path) -> None:
    """Write all files to the empty folder ``fresh``; they are on the disk afterwards."""
    digests = {}
    complex128 = {
        name: names
        for name, tensors in stored.tensors.items()
        if (names := sorted(k for k, v in tensors.items() if v.dtype == torch.complex128))
    }
    for name, tensors in stored.tensors.items():
        file = fresh / f"{name}.safetensors"
        try:
            save_tensors({k: _own(v) for k, v in tensors.items()}, file)
        except (KeyError, ValueError) as error:
            raise UnsupportedError(
                f"Tensors of `{name}` must be of a dtype that safetensors can store, but one is "
                f"not: {error}. Train in another dtype."
            ) from error
        digests[file.name] = _digest(file)
        sync_to_disk(file)
    document = {"format": _FORMAT, "files": digests, "complex128": complex128, **stored.values}
    text = json.dumps({"digest": _digest_of(document), "content": document}, indent=1)
    (fresh / _DOCUMENT).write_text(text, encoding="utf-8")
    sync_to_disk(fresh / _DOCUMENT)
    sync_to_disk(fresh)


def _put_in_place(fresh: Path, folder: Path) -> None:
    previous = _previous(folder)
    if folder.exists():
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    fresh.rename(folder)
    sync_to_disk(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


@contextlib.contextmanager
def _draft(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """Make an empty folder beside ``folder``, for us alone; it is gone if the body fails."""
    fresh = folder.with_name(folder.name + ".writing")
    fresh.mkdir(parents=True, exist_ok=True)
    if fresh.is_symlink():
        _refuse_beside(fresh, "is a link")
    descriptor = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(descriptor, fresh, folder)
        others = [x for x in _others_in(descriptor, names) if not _DRAFT_NAME.fullmatch(x)]
        if others:
            _refuse_beside(fresh, f"holds other files, such as {others[0]!r}")
        for left in os.listdir(descriptor):  # by one that was killed
            os.unlink(left, dir_fd=descriptor)
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
        previous = _previous(folder)
        if not (folder / _DOCUMENT).exists() and (previous / _DOCUMENT).exists():
            folder = previous
    with _damage_named(folder / _DOCUMENT):
        sealed = json.loads(read_text(folder / _DOCUMENT, max_bytes=_MOST_DOCUMENT_BYTES))
        document = sealed["content"]
        if sealed["digest"] != _digest_of(document):
            raise ValueError("its digest differs from the one that was written")
        version, files = document.pop("format"), document.pop("files")
        complex128 = document.pop("complex128", {})  # none in older ones
        if version == _FORMAT:
            _check_files(files)
    if version != _FORMAT:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of format {_FORMAT}, but is of format {version!r:.80}. "
            "Read it with the version of Phalanx that wrote it."
        )
    stored = Stored(values=document)
    for name, digest in files.items():
        with _damage_named(folder / name), open_regular(folder / name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError("its digest differs from the one that was written")
            # The open file, and not whatever has its name by now.
            mapped = safetensors.torch.load_file(f"/proc/self/fd/{file.fileno()}")
            # Copied: who writes to the file later, or unplugs its disk, must not change our state.
            tensors = {k: v.clone() for k, v in mapped.items()}
            for each in complex128.get(Path(name).stem, ()):
                tensors[each] = _complex_of(tensors[each])
            stored.tensors[Path(name).stem] = tensors
    return stored


# Any: JSON.
def _check_files(files: Any) -> None:
    """Refuse names that lead out of the folder, or are none that we write."""
    for name, digest in files.items():
        if not _FILE_NAME.fullmatch(name) or not isinstance(digest, str):
            raise ValueError(f"it names {name!r:.80} as one of its files")


def pack_state(state: object) -> Any:
    """Return plain state, of a scheduler say, as JSON can hold it.

    Mappings become lists of pairs, so that keys keep their type; small tensors of real numbers,
    such as a learning rate, keep their dtype.
    """
    if (
        isinstance(state, Tensor)
        and state.numel() <= _MOST_PACKED
        and _dtype_name(state) in _DTYPES
    ):
        return {"tensor": [_dtype_name(state), list(state.shape), state.flatten().tolist()]}
    if isinstance(state, Mapping):
        return {"pairs": [[_packed_key(k), pack_state(v)] for k, v in state.items()]}
    if isinstance(state, (list, tuple)):
        return [pack_state(value) for value in state]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise CheckpointError(
        f"A checkpoint must hold plain values, but {type(state).__name__} {state!r:.80} is none. "
        "Use a scheduler, an optimizer and callbacks whose state is numbers, strings, lists, dicts "
        "and small tensors."
    )


def _packed_key(key: object) -> bool | int | float | str | None:
    if key is None or isinstance(key, (bool, int, float, str)):
        return key
    raise CheckpointError(
        f"A checkpoint must hold mappings whose keys are numbers or strings, but {key!r:.80} is a "
        f"{type(key).__name__}. Let the state of the callback, scheduler or optimizer hold a list "
        "of pairs."
    )


# Any: JSON.
def check_packed(packed: Any) -> None:
    """Check that ``packed`` is what :func:`pack_state` makes.

    Raises:
        ValueError: It is not.
    """
    if isinstance(packed, dict) and "tensor" in packed:
        _read_tensor(packed)
    elif isinstance(packed, dict):
        pairs = packed.get("pairs")
        if len(packed) != 1 or not isinstance(pairs, list):
            raise ValueError(f"{packed!r:.80} is no mapping of `save()`")
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], (dict, list)):
                raise ValueError(f"{pair!r:.80} is no key with its value")
            check_packed(pair[1])
    elif isinstance(packed, list):
        for value in packed:
            check_packed(value)


def unpack_like(packed: Any, like: object) -> Any:
    """Undo :func:`pack_state`; tuples and counters come back where ``like`` has them."""
    if isinstance(packed, dict) and "tensor" in packed:
        return _read_tensor(packed).to(like.device if isinstance(like, Tensor) else "cpu")
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


# Any: JSON.
def _read_tensor(packed: Any) -> Tensor:
    """Return a tensor as :func:`pack_state` packs it."""
    try:
        dtype, shape, values = packed["tensor"]
        tensor = torch.tensor(values, dtype=_DTYPES[dtype])
        if len(packed) == 1 and tensor.dim() == 1 and tensor.numel() == math.prod(shape):
            return tensor.reshape(shape)
    except (KeyError, ValueError, TypeError, OverflowError, RuntimeError):
        pass
    raise ValueError(f"{packed!r:.80} is no tensor of `save()`")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.detach().to("cpu", copy=True).contiguous()


def _complex_of(pairs: Tensor) -> Tensor:
    """Undo what :func:`_own` does to a complex tensor."""
    if pairs.dtype != torch.float64 or pairs.shape[-1:] != (2,):
        raise ValueError(
            f"{pairs.dtype} of shape {tuple(pairs.shape)} is no complex128 of `save()`"
        )
    return torch.view_as_complex(pairs)


def _digest_of(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
