"""Tensors on their way between two processes: written once to shared memory, read once from there.

The crew's process makes all memory, so it writes to a `Mailbox`, which grows. A worker writes to an
`Outbox` in memory that it was lent; what does not fit travels with the message, and the answer says
how much room would have been enough, so that there is as much the next time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.memory import ALIGN_BYTES
from phalanx.replicas.parcel import Form, copy_of, flat_bytes, is_plain
from phalanx.replicas.shelf import Place, Shelf

__all__ = ["Mailbox", "Outbox", "collect"]

_LEAST_BYTES = 1 << 12  # smaller tensors travel with the message
_FIRST_BYTES = 1 << 16
_CPU = torch.device("cpu")


class Outbox:
    """Room for the tensors of one message at a time.

    Whoever writes waits for the reader's answer before the next message, so nothing is overwritten
    that is still to be read.

    Args:
        room: Bytes on the shelf to write to; None for none.

    Attributes:
        needed_bytes: What the tensors of this message take, those that did not fit included.
    """

    def __init__(self, shelf: Shelf, room: Tensor | None = None) -> None:
        self._shelf = shelf
        self._room = torch.empty(0, dtype=torch.uint8) if room is None else room
        self._used = 0
        self.needed_bytes = 0

    # Any: a token of `parcel.pack`.
    def put(self, tensor: Any) -> Any:
        """Write ``tensor`` and return where it lies; None if it shall travel with the message."""
        if not isinstance(tensor, Tensor) or not is_plain(tensor) or tensor.nbytes < _LEAST_BYTES:
            return None
        content, form = flat_bytes(tensor)
        self.needed_bytes += _aligned(content.numel())
        start = self._take(content.numel())
        if start is None:
            return None
        own = self._room[start : start + content.numel()].copy_(content)
        return ("mail", self._shelf.place_of(own), form)

    def _take(self, size: int) -> int | None:
        """Return where the next ``size`` bytes go."""
        if self._used + size > self._room.numel():
            return None
        start, self._used = self._used, self._used + _aligned(size)
        return start


class Mailbox(Outbox):
    """The same in the crew's process, where there is always room."""

    def clear(self) -> None:
        """Begin another message."""
        self._used = self.needed_bytes = 0

    @property
    def place(self) -> Place | None:
        """Where all the room lies, for somebody else to write to; None while there is none."""
        return self._shelf.place_of(self._room)

    def reserve(self, size: int) -> None:
        """See that a message of ``size`` bytes fits from the next one on."""
        if size > self._room.numel():
            self._grow(size)

    def _take(self, size: int) -> int | None:
        start = super()._take(size)
        if start is None:
            self._grow(size)
            start = super()._take(size)
        return start

    def _grow(self, least: int) -> None:
        """Take a new region; what this message has in the old one is read from there."""
        size = max(_FIRST_BYTES, 2 * self._room.numel(), 2 * least)
        self._room, self._used = self._shelf.allocate(size, torch.uint8, _CPU), 0


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def collect(shelf: Shelf, place: Place, form: Form) -> Tensor:
    """Return a copy of what lies at ``place``, in the reader's process."""
    return copy_of(shelf.at(place), form)
