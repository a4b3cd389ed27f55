"""Messages between an executor and its worker processes: pickled, with tensors set aside.

Large tensors are written once to shared memory, into a `Mailbox`. A worker reads a batch where it
lies, because tasks copy their rows; the executor's process copies what it reads from an answer.
That process makes all memory. What does not fit into the room that it lent a worker travels with
the answer, and the mailbox has room for it the next time.

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

__all__ = ["LONGEST_S", "Mailbox", "load", "pack", "set_timeouts"]

LONGEST_S = 2e6  # 23 days: `poll` counts milliseconds in 31 bits, and infinity is no number to it
_ALIGN_BYTES = 64  # as torch aligns: kernels may choose by it
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


def load(data: bytes, find: Aside = _nothing) -> Any:
    """Undo :func:`pack`; ``find`` returns the object for a token that ``aside`` gave."""
    before = _finding.find
    _finding.find = find
    try:
        return pickle.loads(data)
    finally:
        _finding.find = before


# -- tensors in shared memory ----------------------------------------


class Mailbox:
    """Room for the tensors of one message at a time, which one side writes and the other reads.

    Whoever writes waits for the reader's answer before the next message, so nothing is overwritten
    that is still to be read.

    Args:
        room: Where the bytes to write to lie in the pool; None for none.
        grows: Whether it makes more room when a tensor does not fit: the executor's process does,
            and learns by reading how much room a worker lacked.

    Attributes:
        room: Where the bytes lie; None while there are none.
    """

    def __init__(
        self, pool: SharedMemoryPool, room: TensorHandle | None = None, *, grows: bool = True
    ) -> None:
        self._pool = pool
        self._grows = grows
        self.room = room
        self._left_bytes = self._size_bytes
        self._lacking_bytes = 0

    @property
    def _size_bytes(self) -> int:
        return 0 if self.room is None else self.room.shape[0]

    def begin(self) -> None:
        """Begin another message, with room for what did not fit into the one that was read."""
        if self._lacking_bytes:
            self._grow(self._lacking_bytes)
        self._left_bytes = self._size_bytes
        self._lacking_bytes = 0

    # Any: a token of `pack`.
    def put(self, tensor: Any) -> Any:
        """Write ``tensor`` and return its token: its place, or its bytes without room.

        Small tensors, and what is no plain tensor, have no token.
        """
        if not isinstance(tensor, Tensor) or tensor.numel() * tensor.itemsize < _LEAST_BYTES:
            return None
        parts = _parts_of(tensor)
        if parts is None:
            return None
        content, form = parts
        size = -(-len(content) // _ALIGN_BYTES) * _ALIGN_BYTES
        if size > self._left_bytes and self._grows:
            self._grow(size)
        if self.room is None or size > self._left_bytes:
            return content.numpy().tobytes(), form
        start = self.room.offset_bytes + self.room.shape[0] - self._left_bytes
        self._left_bytes -= size
        place = TensorHandle(self.room.region, start, torch.uint8, (len(content),), (1,))
        self._pool.at(place).copy_(content)
        return place, form

    # Any: a token of `put`.
    def read(self, token: Any) -> Tensor:
        """Return a copy of a tensor that the other side has put; for :func:`load`."""
        place, form = token
        if isinstance(place, bytes):
            self._lacking_bytes += len(place)
            return _restored(place, form)
        return _laid_out(self._pool.at(place).clone(), form)

    # Any: a token of `put`.
    def view(self, token: Any) -> Tensor:
        """Return a tensor that the other side has put where it lies, until the next message."""
        place, form = token
        return _laid_out(self._pool.at(place), form)

    def _grow(self, least: int) -> None:
        """Take a new region; tensors of this message in the old one are read from there."""
        self._left_bytes = max(_FIRST_BYTES, 2 * self._size_bytes, 2 * least)
        self.room = self._pool.allocate(self._left_bytes)


@dataclass(frozen=True)
class _Form:
    """The layout of a tensor in its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _laid_out(content: Tensor, form: _Form) -> Tensor:
    """Return the tensor that these bytes are, in their memory."""
    flat = content.view(form.dtype)
    return flat.as_strided(form.shape, form.strides, flat.storage_offset())


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
    return content, _Form(tensor.dtype, shape, strides)


def _restored(content: bytes, form: _Form) -> Tensor:
    if not content:
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
    # A clone, because it is aligned as torch's own tensors are.
    return _laid_out(torch.frombuffer(bytearray(content), dtype=torch.uint8).clone(), form)


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
