"""Rows on their way to a worker process: written once to shared memory, read once from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.replicas.parcel import Form, copy_of, flat_bytes, is_plain
from phalanx.replicas.shelf import Place, Shelf

__all__ = ["Mailbox", "collect"]

_ALIGN_BYTES = 64
_LEAST_BYTES = 1 << 12  # smaller tensors travel with the message
_FIRST_BYTES = 1 << 16
_CPU = torch.device("cpu")


class Mailbox:
    """Room for the tensors of one message at a time; it grows with them.

    Whoever writes waits for the reader's answer before the next message, so nothing is overwritten
    that is still to be read.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._room = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        """Begin another message."""
        self._used = 0

    # Any: a token of `parcel.pack`.
    def put(self, tensor: Any) -> Any:
        """Write ``tensor`` and return where it lies; None if it shall travel with the message."""
        if not isinstance(tensor, Tensor) or tensor.nbytes < _LEAST_BYTES or not is_plain(tensor):
            return None
        content, form = flat_bytes(tensor)
        start, stop = self._used, self._used + content.numel()
        if stop > self._room.numel():
            self._grow(content.numel())
            start, stop = 0, content.numel()
        self._used = -(-stop // _ALIGN_BYTES) * _ALIGN_BYTES
        own = self._room[start:stop].copy_(content)
        return ("mail", self._shelf.place_of(own), form)

    def _grow(self, least: int) -> None:
        """Take a new region; what this message has in the old one is read from there."""
        size = max(_FIRST_BYTES, 2 * self._room.numel(), 2 * least)
        self._room = self._shelf.allocate(size, torch.uint8, _CPU)


def collect(shelf: Shelf, place: Place, form: Form) -> Tensor:
    """Return a copy of what lies at ``place``, in the reader's process."""
    return copy_of(shelf.at(place), form)
