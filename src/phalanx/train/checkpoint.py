"""A trainer's state on disk: safetensors for the model, `torch.save` without code for the rest.

    DIR/checkpoint.json      position, options, digests of the other files
    DIR/model.safetensors    the module's state dict, under the unwrapped module's keys
    DIR/state.pt             the states of optimizer, scheduler, callbacks, metrics and generators;
                             buffers that no state dict has; extra state that is no tensor

safetensors has no complex128: such tensors are stored as pairs of float64, and listed in the JSON.
`state.pt` is read with ``weights_only=True``, so nothing in it is run.

A checkpoint is written into a folder beside DIR, synced, and renamed; DIR is the old one or the new
one, never half of each. A crash between the two renames leaves the old one as DIR.previous, which
is read then. Removed are files that we write, and no others: not from DIR, nor from DIR.writing and
DIR.previous beside it, where a link is not followed either.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError, PhalanxError, UnsupportedError
from phalanx.files import open_regular, read_text, save_tensors, sync_to_disk
from phalanx.torch_internals import pytree

__all__ = ["Stored", "check_storable", "load_stored", "save_stored"]

_FORMAT = 1
_DOCUMENT = "checkpoint.json"
_MODEL, _STATE = "model.safetensors", "state.pt"
_NAMES = {_DOCUMENT, _MODEL, _STATE}
_MOST_DOCUMENT_BYTES = 1 << 20
_DRAFT_NAME = re.compile(
    r"\.tmp[A-Za-z0-9]{6}"
)  # safetensors writes to such a file, and renames it
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
        model: The module's tensors by name.
        state: What `torch.save` can write, and `torch.load` can read without running code.
        values: Everything else, as JSON can hold it.
    """

    model: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


# Any: whatever a user's `state_dict()` returns.
def check_storable(name: str, state: Any) -> None:
    """Refuse a state that could be written, and then not be read without running code.

    Args:
        name: Where it is from, such as "optimizer.state_dict()".

    Raises:
        UnsupportedError: It holds more than tensors and plain values.
    """
    draft = io.BytesIO()
    try:
        torch.save(pytree.tree_map_only(Tensor, lambda _: None, state), draft)
        draft.seek(0)
        torch.load(draft, weights_only=True)
    except Exception as error:  # pickle's, torch's, and those of the user's objects
        unknown = re.search(r"GLOBAL (\S+)", str(error))  # in torch's long advice
        told = f"it holds `{unknown[1]}`" if unknown else str(error).partition("\n")[0]
        raise UnsupportedError(
            f"`{name}` must hold only tensors, numbers, strings, lists and dicts, which a "
            f"checkpoint can hold without code, but does not: {told:.300}. Convert the rest."
        ) from error


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
        _check_place(folder)
        with _draft(folder) as fresh:
            _check_previous(_previous(folder))
            _write(stored, fresh)
            _put_in_place(fresh, folder)


def _check_place(folder: Path) -> None:
    """Refuse a folder that may not be replaced by a checkpoint."""
    if not os.path.lexists(folder):
        return
    others = _others_in(folder)
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


def _check_previous(previous: Path) -> None:
    if previous.is_symlink():
        _refuse_beside(previous, "is a link")
    if previous.exists() and (others := _others_in(previous)):
        _refuse_beside(previous, f"holds other files, such as {others[0]!r}")


def _refuse_beside(path: Path, found: str) -> NoReturn:
    raise ConfigError(
        f"`folder` must leave room beside it for a draft and for the checkpoint before, but "
        f"`{path}` {found}. Move that away, or give another folder."
    )


def _others_in(folder: Path | int) -> list[str]:
    """Name what lies in a folder and is no file, or link, of a checkpoint."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name not in _NAMES or entry.is_dir(follow_symlinks=False)
        )


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _write(stored: Stored, fresh: Path) -> None:
    """Write all files to the empty folder ``fresh``; they are on the disk afterwards."""
    complex128 = sorted(k for k, v in stored.model.items() if v.dtype == torch.complex128)
    try:
        save_tensors({k: _own(v) for k, v in stored.model.items()}, fresh / _MODEL)
    except (KeyError, ValueError) as error:
        raise UnsupportedError(
            "Tensors of the model must be of a dtype that safetensors can store, but one is not: "
            f"{error}. Train in another dtype."
        ) from error
    torch.save(_cloned(stored.state), fresh / _STATE)
    digests = {name: _digest(fresh / name) for name in (_MODEL, _STATE)}
    for name in digests:
        sync_to_disk(fresh / name)
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
def _draft(folder: Path) -> Iterator[Path]:
    """Make an empty folder beside ``folder``, for us alone; it is gone if the body fails."""
    fresh = folder.with_name(folder.name + ".writing")
    fresh.mkdir(parents=True, exist_ok=True)
    if fresh.is_symlink():
        _refuse_beside(fresh, "is a link")
    descriptor = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(descriptor, fresh, folder)
        others = [x for x in _others_in(descriptor) if not _DRAFT_NAME.fullmatch(x)]
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
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # A ValueError: no path at all. A RuntimeError: `torch.save` cannot write.
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
        complex128 = document.pop("complex128")
        if version == _FORMAT and files.keys() != {_MODEL, _STATE}:
            raise ValueError(f"it names {sorted(files)!r:.80} as its files")
    if version != _FORMAT:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of format {_FORMAT}, but is of format {version!r:.80}. "
            "Read it with the version of Phalanx that wrote it."
        )
    with _read_whole(folder / _MODEL, files[_MODEL]) as file:
        # The open file, and not whatever has its name by now.
        mapped = safetensors.torch.load_file(f"/proc/self/fd/{file.fileno()}")
        # Copied: who writes to the file later, or unplugs its disk, must not change our state.
        model = {k: v.clone() for k, v in mapped.items()}
        for each in complex128:
            model[each] = _complex_of(model[each])
    with _read_whole(folder / _STATE, files[_STATE]) as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle's and torch's
            raise ValueError(str(error).partition("\n")[0]) from error
    return Stored(model=model, state=state, values=document)


@contextlib.contextmanager
def _read_whole(path: Path, digest: str) -> Iterator[IO[bytes]]:
    """Open a file that has ``digest``."""
    with _damage_named(path), open_regular(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise ValueError("its digest differs from the one that was written")
        file.seek(0)
        yield file


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGES as error:
        raise CheckpointError(
            f"Checkpoint file `{path}` must be readable and whole, but is not: {error}. Give a "
            "folder that `save()` has written."
        ) from error


# Any: the states of all.
def _cloned(state: Any) -> Any:
    """Return ``state`` with tensors on the CPU, in memory of their own: views would write all."""
    return pytree.tree_map_only(Tensor, lambda each: each.detach().to("cpu", copy=True), state)


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
