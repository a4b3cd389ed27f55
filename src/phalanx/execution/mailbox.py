"""Tensors on their way between two processes: written once to shared memory, read once from there.

The executor's process makes all memory, so it writes to a `Mailbox`, which grows. A worker writes
to an `Outbox` in memory that it was lent; what does not fit travels with the message, and the
answer says how much room would have been enough, so that there is as much the next time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.ipc import aligned
from phalanx.memory import SharedMemoryPool, TensorHandle
from phalanx.replicas import (
    Form,
    alignment_of,
    bytes_of,
    copy_of,
    is_plain,
    span_bytes,
)

__all__ = ["Mailbox", "Outbox", "collect"]

_LEAST_BYTES = 1 << 8  # what is smaller travels with the message, which is more work over there
_FIRST_BYTES = 1 << 16
_CPU = torch.device("cpu")


class Outbox:
    """Room for the tensors of one message at a time.

    Whoever writes waits for the reader's answer before the next message, so nothing is overwritten
    that is still to be read.

    Args:
        room: Where the bytes to write to lie in the pool; None for none.

    Attributes:
        room: Where the bytes lie; None while there are none.
        needed_bytes: What the tensors of this message take, those that did not fit included.
    """

    def __init__(self, pool: SharedMemoryPool, room: TensorHandle | None = None) -> None:
        self._pool = pool
        self.room = room
        self._used = 0
        self.needed_bytes = 0

    # Any: a token of `pack`.
    def put(self, tensor: Any) -> Any:
        """Write ``tensor`` and return where it lies; None if it shall travel with the message."""
        if not isinstance(tensor, Tensor) or not is_plain(tensor) or tensor.nbytes < _LEAST_BYTES:
            return None
        size = span_bytes(tensor)
        self.needed_bytes += aligned(size)
        start = self._take(size)
        if start is None:
            return None
        assert self.room is not None
        region, offset = self.room.region, self.room.offset_bytes + start
        place = TensorHandle(region, offset, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.is_contiguous():
            self._pool.at(place).copy_(tensor)
        else:  # elements may lie in one another's memory
            self._pool.at(_as_bytes(place, size)).copy_(bytes_of(tensor))
        return ("mail", place, size, alignment_of(tensor))

    @property
    def _room_bytes(self) -> int:
        return 0 if self.room is None else self.room.shape[0]

    def _take(self, size: int) -> int | None:
        """Return where the next ``size`` bytes go."""
        if self._used + size > self._room_bytes:
            return None
        start, self._used = self._used, self._used + aligned(size)
        return start


class Mailbox(Outbox):
    """The same in the executor's process, where there is always room."""

    def clear(self) -> None:
        """Begin another message."""
        self._used = self.needed_bytes = 0

    def reserve(self, size: int) -> None:
        """See that a message of ``size`` bytes fits from the next one on."""
        if size > self._room_bytes:
            self._grow(size)

    def _take(self, size: int) -> int | None:
        start = super()._take(size)
        if start is None:
            self._grow(size)
            start = super()._take(size)
        return start

    def _grow(self, least: int) -> None:
        """Take a new region; what this message has in the old one is read from there."""
        size = max(_FIRST_BYTES, 2 * self._room_bytes, 2 * least)
        room = self._pool.allocate(size, torch.uint8, _CPU)
        self.room, self._used = self._pool.handle_of(room), 0


def _as_bytes(place: TensorHandle, size: int) -> TensorHandle:
    return TensorHandle(place.region, place.offset_bytes, torch.uint8, (size,), (1,))


def collect(pool: SharedMemoryPool, place: TensorHandle, size: int, alignment: int) -> Tensor:
    """Return a copy of the ``size`` bytes at ``place``, in the reader's process.

    Args:
        alignment: Of the original's first byte, modulo 64, and so of the copy's.
    """
    there = pool.at(place)
    if alignment == 0 and there.is_contiguous():
        return there.clone()
    form = Form(place.dtype, place.shape, place.strides, alignment)
    return copy_of(pool.at(_as_bytes(place, size)), form)
