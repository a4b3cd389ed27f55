"""Shared memory that takes the gradients of one microbatch each."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.replicas.shelf import Place, Shelf

__all__ = ["Slot", "Slots"]


class Slot:
    """Shared memory for the gradients of one microbatch; free again when nobody holds it."""

    def __init__(self, region: int, gradients: list[Tensor | None]) -> None:
        self.region = region
        self.gradients = gradients


class Slots:
    """Slots, made when there are none free."""

    def __init__(self, parameters: Sequence[nn.Parameter], shelf: Shelf) -> None:
        self._flat = [torch.empty(p.numel(), dtype=p.dtype, device="meta") for p in parameters]
        self.shelf = shelf
        self._lock = threading.Lock()
        self._free: list[tuple[int, list[Tensor | None]]] = []
        self.layout: list[Place | None] = []
        region, gradients = self._make()
        self.layout = [None if g is None else shelf.place_of(g) for g in gradients]
        self._free.append((region, gradients))

    def take(self) -> Slot:
        """Return a free slot; it is free again when it is collected."""
        with self._lock:
            region, gradients = self._free.pop() if self._free else self._make()
        slot = Slot(region, gradients)
        weakref.finalize(slot, self._free.append, (region, gradients)).atexit = False
        return slot

    def _make(self) -> tuple[int, list[Tensor | None]]:
        tensors = self.shelf.allocate_like(self._flat)
        places = [self.shelf.place_of(tensor) for tensor in tensors]
        region = next((place.region for place in places if place is not None), -1)
        return region, [t if t.numel() else None for t in tensors]
