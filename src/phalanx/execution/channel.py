"""Messages between an executor and its worker processes: pickled, with tensors set aside.

Large tensors are written once to shared memory and read once from there. The executor's process
makes all memory, so it writes to a `Mailbox`, which grows. A worker writes to an `Outbox` in memory
that it was lent; tensors that do not fit travel with the message, and the answer says how much room
would have been enough, so that there is as much the next time.

This is the pickle of `multiprocessing`, between a process and its own forks; it crosses no host and
reads no file (SECURITY.md). Torch's own sharing is not used: it would move the tensors' storage.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from phalanx.memory import SharedMemoryPool, TensorHandle

__all__ = ["LONGEST_S", "Mailbox", "Outbox", "load", "pack", "set_timeouts"]

LONGEST_S = 2e6  # 23 days: `poll` counts milliseconds in 31 bits, and infinity is no number to it
_ALIGN_BYTES = 64  # kernels may choose by alignment, so a copy lies as its original lay
_LEAST_BYTES = 1 << 8  # smaller tensors travel with the message, which is more work over there
_FIRST_BYTES = 1 << 16

# Any: objects of the user's code; tokens are tuples that the two sides agree on.
Aside = Callable[[Any], Any]


# -- pickles ---------------------------------------------------------


class _Packer(pickle.Pickler):
    """Ask about objects that are not plain values or containers: a call for each would cost more.

    An object that is set aside is met once; where it comes again, it is the same one at the reader.
    """

    aside: Aside

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            return NotImplemented
        token = self.aside(obj)
        if token is not None:
            return _found, token
        parts = _parts_of(obj) if isinstance(obj, Tensor) else None
        if parts is None:
            return NotImplemented
        content, form = parts
        return _restored, (content.numpy().tobytes(), form)


def _nothing(_: Any) -> None:
    return None


class _Finding(threading.local):
    """The function that the thread that unpickles asks about tokens."""

    find: Aside = staticmethod(_nothing)


_finding = _Finding()


def _found(*token: Any) -> Any:
    return _finding.find(token)


def pack(value: Any, aside: Aside = _nothing) -> bytes:
    """Pickle ``value``; the token that ``aside`` returns for an object stands for it, unless None.

    It is not asked about plain values, lists, tuples, dicts, sets, classes and functions.
    """
    file = io.BytesIO()
    packer = _Packer(file, protocol=pickle.HIGHEST_PROTOCOL)
    packer.aside = aside
    packer.dump(value)
    return file.getvalue()


def load(data: bytes | memoryview, find: Aside = _nothing) -> Any:
    """Undo :func:`pack`; ``find`` returns the object for a token that ``aside`` gave."""
    before = _finding.find
    _finding.find = find
    try:
        return pickle.loads(data)
    finally:
        _finding.find = before


# -- tensors in shared memory ----------------------------------------


class Outbox:
    """Room for the tensors of one message at a time.

    Whoever writes waits for the reader's answer before the next message, so nothing is overwritten
    that is still to be read.

    Args:
        room: Where the bytes to write to lie in the pool; None for none.

    Attributes:
        room: Where the bytes lie; None while there are none.
        needed_bytes: The bytes that the tensors of this message take, with those that did not fit.
    """

    def __init__(self, pool: SharedMemoryPool, room: TensorHandle | None = None) -> None:
        self._pool = pool
        self.room = room
        self._left_bytes = 0 if room is None else room.shape[0]
        self.needed_bytes = 0

    # Any: a token of `pack`.
    def put(self, tensor: Any) -> Any:
        """Write ``tensor`` and return its place; None if it shall travel with the message."""
        if not isinstance(tensor, Tensor) or tensor.numel() * tensor.itemsize < _LEAST_BYTES:
            return None
        parts = _parts_of(tensor)
        if parts is None:
            return None
        content, form = parts
        size = -(-len(content) // _ALIGN_BYTES) * _ALIGN_BYTES
        self.needed_bytes += size
        if size > self._left_bytes and not self._grow(size):
            return None
        assert self.room is not None
        start = self.room.offset_bytes + self.room.shape[0] - self._left_bytes
        self._left_bytes -= size
        place = TensorHandle(self.room.region, start, torch.uint8, (len(content),), (1,))
        self._pool.at(place).copy_(content)
        return place, form

    # Any: a token of `put`.
    def read(self, token: Any) -> Tensor:
        """Return a copy of a tensor that the other side has put; for :func:`load`."""
        place, form = token
        found: Tensor = form.copy_of(self._pool.at(place))
        return found

    def _grow(self, least: int) -> bool:  # noqa: ARG002 - see `Mailbox`
        """Make room for ``least`` bytes, where that can be done."""
        return False


class Mailbox(Outbox):
    """The same in the executor's process, where there is always room."""

    def begin(self, expected_bytes: int = 0) -> None:
        """Begin another message, with room for at least ``expected_bytes``."""
        self._left_bytes = 0 if self.room is None else self.room.shape[0]
        self.needed_bytes = 0
        if expected_bytes > self._left_bytes:
            self._grow(expected_bytes)

    def _grow(self, least: int) -> bool:
        """Take a new region; tensors of this message in the old one are read from there."""
        before = 0 if self.room is None else self.room.shape[0]
        size = max(_FIRST_BYTES, 2 * before, 2 * least)
        self.room = self._pool.allocate(size)
        self._left_bytes = size
        return True


@dataclass(frozen=True)
class _Form:
    """The layout of a tensor in its memory.

    Attributes:
        alignment: Of its first byte, modulo 64.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    def copy_of(self, content: Tensor) -> Tensor:
        """Return the tensor of these bytes, in memory of its own, aligned as the original."""
        room = torch.empty(len(content) + _ALIGN_BYTES, dtype=torch.uint8)
        start = (self.alignment - room.data_ptr()) % _ALIGN_BYTES
        own = room[start : start + len(content)].copy_(content).view(self.dtype)
        return own.as_strided(self.shape, self.strides, own.storage_offset())


def _parts_of(tensor: Tensor) -> tuple[Tensor, _Form] | None:
    """Return the bytes that ``tensor`` spans and its layout there; None if it is more than that."""
    is_plain = (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    if not is_plain:
        return None
    shape, strides = tuple(tensor.shape), tensor.stride()
    last = sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)])
    count = last + 1 if tensor.numel() else 0
    content = tensor.detach().as_strided((count,), (1,)).view(torch.uint8)
    offset = tensor.data_ptr() % _ALIGN_BYTES if count else 0
    alignment = offset - offset % tensor.itemsize  # of one between two elements, before it
    return content, _Form(tensor.dtype, shape, strides, alignment)


def _restored(content: bytes, form: _Form) -> Tensor:
    if not content:
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
    return form.copy_of(torch.frombuffer(bytearray(content), dtype=torch.uint8))


# -- timeouts --------------------------------------------------------


def set_timeouts(connection: Connection, seconds: float) -> None:
    """Make a read or a write that gets nothing done for ``seconds`` raise `BlockingIOError`.

    Asking whether there is something to read is not enough: a process may stop in the middle of a
    message, or, before one that is larger than the kernel's buffer, without reading any of it.

    Args:
        connection: One end of a ``multiprocessing.Pipe(duplex=True)``.
    """
    whole, fraction = divmod(max(seconds, 1e-6), 1.0)  # the kernel takes 0 for "for ever"
    value = struct.pack("@ll", int(whole), int(fraction * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setblocking(True)  # whatever the process's default is: that flag is the connection's
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, value)
