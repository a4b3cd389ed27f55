"""A checkpoint on disk: the old one or the new one, never half of each.

    DIR/model.safetensors    tensors of the module's state dict, for any program to read
    DIR/state.pt             everything else, by `torch.save`
    DIR/checkpoint.json      the format, and the digests of the two

`state.pt` is read with ``weights_only=True``, so nothing in it is run.

A checkpoint is written to DIR.writing, synced, and renamed. A crash between the two renames leaves
the one before as DIR.previous, which is read then. Only files with these names are removed. DIR may
be a link to a folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError, PhalanxError, UnsupportedError
from phalanx.files import save_tensors, sync_to_disk
from phalanx.torch_internals import pytree

# States by the name of their part; ["module"]["model"] is the module's state dict. Any: all kinds.
Content = dict[str, Any]

_FORMAT = 4
_DOCUMENT, _MODEL, _STATE = "checkpoint.json", "model.safetensors", "state.pt"
_NAMES = {_DOCUMENT, _MODEL, _STATE}
_UNKNOWN_TO_SAFETENSORS = {torch.complex32, torch.complex128}
_SAFETENSORS_DRAFT = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # it writes this file, then renames it


# Any: whatever a user's `state_dict()` returns.
def check_storable(name: str, state: Any) -> None:
    """Refuse a state that could be written, and then not be read without running code.

    Args:
        name: Its part, such as "optimizer".

    Raises:
        UnsupportedError: It holds more than tensors and plain values.
    """
    try:
        from_bytes(to_bytes(pytree.tree_map_only(Tensor, lambda _: None, state)))
    except Exception as error:  # pickle's, torch's, and those of the user's objects
        unknown = re.search(r"GLOBAL (\S+)", str(error))  # in torch's long advice
        found = f"it holds `{unknown[1]}`" if unknown else _first_line(error)
        raise UnsupportedError(
            f"The `state_dict()` of the {name} must hold only tensors, numbers, strings, lists and "
            f"dicts, which need no code, but does not: {found:.300}. Convert the rest."
        ) from error


def to_bytes(state: Any) -> bytes:
    """Return ``state`` as the bytes of a file of `torch.save`."""
    stream = io.BytesIO()
    torch.save(copied(state), stream)
    return stream.getvalue()


def from_bytes(stored: bytes) -> Any:
    """Undo :func:`to_bytes`; nothing in it is run."""
    return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)


def copied(state: Any) -> Any:
    """Return ``state`` with copies on the CPU: a view would be written with its whole storage."""
    return pytree.tree_map_only(Tensor, _cpu_copy, state)


def write_checkpoint(content: Content, folder: Path) -> None:
    """Write ``content`` to ``folder``, replacing the checkpoint there as a whole.

    Raises:
        ConfigError: ``folder``, or ``folder.writing`` or ``folder.previous`` beside it, holds
            something else.
        CheckpointError: It cannot be written: no room, no permission, or another trainer writes it.
    """
    try:
        folder = Path(os.path.realpath(folder))  # a link to a folder stays a link
        _check_ours(folder, is_place=True)
        with _draft(folder) as draft:
            _check_ours(_beside(folder, "previous"))
            _write(content, draft)
            _put_in_place(draft, folder)
    except PhalanxError:
        raise
    # A ValueError: no path at all. A RuntimeError: `torch.save` cannot write.
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"`folder` must be a place that a checkpoint can be written to, but is "
            f"{str(folder)!r}: {error}. The checkpoint before, if any, is as it was. Make room "
            "and see to the permissions, or give another folder."
        ) from error


def _check_ours(folder: Path, *, is_place: bool = False) -> None:
    """Refuse a folder of somebody else's, which we would remove.

    Args:
        is_place: The checkpoint's own folder, which has been a whole one, and is to be moved.
    """
    if not os.path.lexists(folder):
        return
    with os.scandir(folder) as entries:
        kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    names = sorted(kinds)
    others = [x for x in names if kinds[x] or not (x in _NAMES or _SAFETENSORS_DRAFT.fullmatch(x))]
    if others:
        found = f"holds other files, such as {others[0]!r}"
    elif is_place and names and _DOCUMENT not in names:
        found = f"holds {names[0]!r} and no {_DOCUMENT}"
    elif is_place and os.path.samefile(folder, os.curdir):
        found = "is the current directory"
    else:
        return
    raise ConfigError(
        "`folder` must be new, empty or a checkpoint, and so must be those ending in `.writing` "
        f"and `.previous` beside it, but `{folder}` {found}. Move that away, or give another "
        "folder."
    )


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.{ending}")


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Make an empty folder next to ``folder``, for us alone; it is gone if the body fails."""
    draft = _beside(folder, "writing")
    draft.mkdir(parents=True, exist_ok=True)
    _check_ours(draft)
    with _locked(draft, folder):
        for left in draft.iterdir():  # by a process that was killed
            left.unlink()
        try:
            yield draft
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


@contextmanager
def _locked(draft: Path, folder: Path) -> Iterator[None]:
    """Hold ``draft`` against other processes, where its file system knows of locks."""
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"`folder` must be written by one trainer at a time, but another is writing "
                f"`{folder}`. Give each its own folder."
            ) from error
        except OSError:  # nothing can be locked here
            pass
        yield
    finally:
        os.close(descriptor)


def _write(content: Content, draft: Path) -> None:
    """Write all files to the empty folder ``draft``; they are on the disk afterwards."""
    held = content["module"]
    model = {
        name: each
        for name, each in held["model"].items()
        if isinstance(each, Tensor) and each.dtype not in _UNKNOWN_TO_SAFETENSORS
    }
    rest = {name: each for name, each in held["model"].items() if name not in model}
    plain = {name: _cpu_copy(each).contiguous() for name, each in model.items()}
    save_tensors(plain, draft / _MODEL)
    torch.save(copied({**content, "module": {**held, "model": rest}}), draft / _STATE)
    digests = {name: _digest(draft / name) for name in (_MODEL, _STATE)}
    text = json.dumps({"format": _FORMAT, "files": digests}, indent=1)
    (draft / _DOCUMENT).write_text(text, encoding="utf-8")
    for path in (draft / _MODEL, draft / _STATE, draft / _DOCUMENT, draft):
        sync_to_disk(path)


def _put_in_place(draft: Path, folder: Path) -> None:
    previous = _beside(folder, "previous")
    if folder.exists():
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    draft.rename(folder)
    sync_to_disk(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def read_checkpoint(folder: Path) -> Content:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of a format that this version does not read.
    """
    with _damage_named(folder):
        folder = Path(os.path.realpath(folder))
        previous = _beside(folder, "previous")
        if not (folder / _DOCUMENT).exists() and (previous / _DOCUMENT).exists():
            folder = previous
    with _damage_named(folder / _DOCUMENT):
        document = json.loads((folder / _DOCUMENT).read_text("utf-8"))
        version = document.get("format", 1)
        digests = document["files"] if version == _FORMAT else {}
    if version != _FORMAT:
        raise CheckpointError(
            f"Checkpoint `{folder / _DOCUMENT}` must be of format {_FORMAT}, but is of format "
            f"{version!r:.80}. Finish the run with the version of Phalanx that wrote it, or load "
            f"`{_MODEL}` beside it into the module and begin a new run."
        )
    with _opened(folder / _MODEL, digests) as file:
        # The open file, and not whatever has its name by now.
        model = safetensors.torch.load_file(f"/proc/self/fd/{file.fileno()}")
    with _opened(folder / _STATE, digests) as file:
        content: Content = torch.load(file, map_location="cpu", weights_only=True)
        content["module"]["model"] |= model
    return content


@contextmanager
def _opened(path: Path, digests: dict[str, str]) -> Iterator[IO[bytes]]:
    """Open a file of ours that has its digest."""
    with _damage_named(path), path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digests.get(path.name):
            raise ValueError(f"its digest differs from the one in {_DOCUMENT}")
        file.seek(0)
        yield file


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of files, JSON, pickle, torch and safetensors
        raise CheckpointError(
            f"Checkpoint file `{path}` must be readable and whole, but is not: "
            f"{_first_line(error)}. Take an older checkpoint, or the folder of a whole `save()`."
        ) from error


def _first_line(error: Exception) -> str:
    # The second sentence of torch's is about files of other programs.
    return str(error).partition("\n")[0].partition(". ")[0] or repr(error)


def _cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).resolve_conj()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
