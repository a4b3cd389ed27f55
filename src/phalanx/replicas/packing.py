"""What travels between an executor and its worker processes: pickled, with the tensors set aside.

This is the pickle of `multiprocessing`, between a process and its own forks; it crosses no host and
reads no file (SECURITY.md). Tensors go as bytes, or as a place in memory that both sides see; never
through torch's own sharing, which would move their storage.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ConfigError, PhalanxError

__all__ = [
    "Form",
    "alignment_of",
    "bytes_of",
    "copied",
    "copy_of",
    "is_plain",
    "load",
    "pack",
    "pack_data",
    "span_bytes",
]

_ALIGN_BYTES = 64  # kernels may choose by alignment, so a copy lies as its original lay

# Any: whatever the user's code makes; tokens are tuples that the two sides agree on.
Aside = Callable[[Any], Any]


class _Packer(pickle.Pickler):
    """Ask about objects that are not plain values or containers: a call for each would cost more.

    An object that is set aside is met once; where it comes again, it is the same one at the reader.
    """

    def __init__(self, file: io.BytesIO, aside: Aside) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._aside = aside

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            return NotImplemented
        token = self._aside(obj)
        if token is not None:
            return _found, token
        if isinstance(obj, Tensor) and is_plain(obj):
            return _restored, _taken_apart(obj)
        return NotImplemented


def _nothing(_: Any) -> None:
    return None


class _Finding(threading.local):
    """Whom the thread that unpickles asks about tokens."""

    find: Aside = staticmethod(_nothing)


_finding = _Finding()


def _found(*token: Any) -> Any:
    return _finding.find(token)


def pack(value: Any, aside: Aside = _nothing) -> bytes:
    """Pickle ``value``; what ``aside`` returns for an object stands for it, unless it is None.

    It is not asked about plain values, lists, tuples, dicts, sets, classes and functions.
    """
    file = io.BytesIO()
    _Packer(file, aside).dump(value)
    return file.getvalue()


def load(data: bytes, find: Aside = _nothing) -> Any:
    """Undo :func:`pack`; ``find`` returns the object for a token that ``aside`` gave."""
    before = _finding.find
    _finding.find = find
    try:
        return pickle.loads(data)
    finally:
        _finding.find = before


# Any: the user's data.
def pack_data(data: Any, aside: Aside = _nothing) -> bytes:
    """Do as :func:`pack` for what batches hold.

    Raises:
        ConfigError: Something in it cannot be pickled.
        OutOfSpace: There is no room for what ``aside`` sets aside.
    """
    try:
        return pack(data, aside)
    except PhalanxError:
        raise
    except Exception as error:  # whatever the user's objects raise when pickled
        raise ConfigError(
            "What a batch holds must be picklable to be sent to worker processes, but is "
            f"not: {error}. Give tensors and plain values, or use executor='threads'."
        ) from None


# -- tensors as bytes ------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a tensor lies in its memory.

    Attributes:
        alignment: Of its first byte, modulo 64.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int


def span_bytes(tensor: Tensor) -> int:
    """Return how many bytes ``tensor`` spans."""
    if tensor.numel() == 0:
        return 0
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
    return (last + 1) * tensor.itemsize


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory that ``tensor`` spans."""
    count = span_bytes(tensor) // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,)).view(torch.uint8)


def alignment_of(tensor: Tensor) -> int:
    """Return where its first byte lies, modulo 64; of one between two elements' places, before."""
    offset = tensor.data_ptr() % _ALIGN_BYTES if tensor.numel() else 0
    return offset - offset % tensor.itemsize


def copy_of(content: Tensor, form: Form) -> Tensor:
    """Return the tensor of this form, in memory of its own, aligned as the original."""
    room = torch.empty(content.numel() + _ALIGN_BYTES, dtype=torch.uint8)
    start = (form.alignment - room.data_ptr()) % _ALIGN_BYTES
    own = room[start : start + content.numel()].copy_(content).view(form.dtype)
    return own.as_strided(form.shape, form.strides, own.storage_offset())


def copied(tensor: Tensor) -> Tensor:
    """Return a copy that lies as ``tensor`` does, where that is plain; else any copy."""
    if not is_plain(tensor) or not tensor.numel():
        return tensor.clone()
    form = Form(tensor.dtype, tuple(tensor.shape), tensor.stride(), alignment_of(tensor))
    return copy_of(bytes_of(tensor), form)


def _taken_apart(tensor: Tensor) -> tuple[bytes, Form]:
    shape, strides = tuple(tensor.shape), tensor.stride()
    form = Form(tensor.dtype, shape, strides, alignment_of(tensor))
    return bytes_of(tensor).numpy().tobytes(), form


def _restored(content: bytes, form: Form) -> Tensor:
    if not content:
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
    return copy_of(torch.frombuffer(bytearray(content), dtype=torch.uint8), form)


def is_plain(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is nothing but numbers in the memory of a CPU."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
