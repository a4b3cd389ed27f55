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
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError, UnsupportedError

__all__ = ["Stored", "load_stored", "pack_state", "save_stored", "unpack_like"]

_FORMAT = 1
_DOCUMENT = "checkpoint.json"


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
        ConfigError: ``folder`` holds something else.
        UnsupportedError: safetensors has no such dtype.
    """
    folder = folder.resolve()  # a link to a folder stays a link
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _DOCUMENT).exists():
        raise ConfigError(
            f"`folder` must be new, empty or a checkpoint, but `{folder}` holds other files. Give "
            "a folder of the checkpoint's own."
        )
    fresh = folder.with_name(folder.name + ".writing")
    previous = folder.with_name(folder.name + ".previous")
    if fresh.exists():
        shutil.rmtree(fresh)
    fresh.mkdir(parents=True)
    digests = {}
    for name, tensors in stored.tensors.items():
        file = fresh / f"{name}.safetensors"
        try:
            safetensors.torch.save_file({k: _own(v) for k, v in tensors.items()}, file)
        except (KeyError, ValueError, SafetensorError) as error:
            shutil.rmtree(fresh)
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
    if folder.exists():
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    fresh.rename(folder)
    _sync(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def load_stored(folder: Path) -> Stored:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of a format that this version does not read.
    """
    folder = folder.resolve()
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
            stored.tensors[Path(name).stem] = safetensors.torch.load_file(folder / name)
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
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
