"""Shared memory that takes what one microbatch leaves: its gradients, and what is in buffers.

What is written where is settled when an executor starts, so an answer only says what there is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.ipc import ALIGN_BYTES
from phalanx.memory import SharedMemoryPool, TensorHandle
from phalanx.replicas import Head, Statistic, Statistics

__all__ = ["LARGE_BYTES", "Filling", "Slot", "SlotLayout", "Slots"]

LARGE_BYTES = 64 << 10
"""Gradients that are smaller are copied together; larger buffers, seldom written, have no place."""


class Slot:
    """Shared memory of one microbatch; free again when nobody holds it.

    Attributes:
        gradients: By parameter, in memory order; None for those without elements.
        statistics: By head.
    """

    def __init__(
        self, region: int, gradients: list[Tensor | None], statistics: list[Tensor]
    ) -> None:
        self.region = region
        self.gradients = gradients
        self.statistics = statistics


@dataclass(frozen=True)
class SlotLayout:
    """Where things lie in every slot; the region's number is that of the first one."""

    gradients: list[TensorHandle | None]
    heads: list[Head]
    statistics: list[TensorHandle]


class Slots:
    """Slots, made when there are none free.

    In a slot gradients lie as the parameters lie on the shelf, so whoever adds what is in two slots
    to the buffer of gradients, which lies like that, too, can add all of it at once.

    Args:
        heads: What microbatches may leave in buffers.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], heads: Sequence[Head], shelf: SharedMemoryPool
    ) -> None:
        self.shelf = shelf
        self._parameters = [(p.numel(), p.dtype, shelf.place_of(p)) for p in parameters]
        self._spans = _spans(self._parameters)
        buffers = [torch.empty(h.shape, dtype=h.dtype, device="meta") for h in heads]
        told = [0 < buffer.nbytes <= LARGE_BYTES for buffer in buffers]
        sizes = [stop - start for start, stop in self._spans.values()]
        self._rooms = [
            *(torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes),
            *(buffer for buffer, yes in zip(buffers, told, strict=True) if yes),
        ]
        self._lock = threading.Lock()
        self._free: list[tuple[int, list[Tensor | None], list[Tensor]]] = []
        region, gradients, statistics = self._make()
        self.layout = SlotLayout(
            [None if g is None else shelf.place_of(g) for g in gradients],
            [head for head, yes in zip(heads, told, strict=True) if yes],
            [place for each in statistics if (place := shelf.place_of(each)) is not None],
        )
        self._free.append((region, gradients, statistics))

    def take(self) -> Slot:
        """Return a free slot; it is free again when it is collected."""
        with self._lock:
            room = self._free.pop() if self._free else self._make()
        slot = Slot(*room)
        weakref.finalize(slot, self._free.append, room).atexit = False
        return slot

    def _make(self) -> tuple[int, list[Tensor | None], list[Tensor]]:
        rooms = self.shelf.allocate_like(self._rooms)
        places = [self.shelf.place_of(room) for room in rooms]
        number = next((place.region for place in places if place is not None), -1)
        mirrors = dict(zip(self._spans, rooms, strict=False))
        gradients: list[Tensor | None] = []
        for count, dtype, place in self._parameters:
            if place is None:
                gradients.append(None)
                continue
            start = place.offset_bytes - self._spans[place.region][0]
            own = mirrors[place.region][start : start + count * dtype.itemsize]
            with torch.inference_mode(False):  # a first run may be under it
                gradients.append(own.view(dtype))
        return number, gradients, rooms[len(self._spans) :]


_Lying = tuple[
    int, torch.dtype, TensorHandle | None
]  # a parameter: elements, dtype, and where they lie


def _spans(parameters: Sequence[_Lying]) -> dict[int, tuple[int, int]]:
    """Return from which byte to which parameters lie, by region."""
    found: dict[int, tuple[int, int]] = {}
    for count, dtype, place in parameters:
        if place is not None:
            start = place.offset_bytes // ALIGN_BYTES * ALIGN_BYTES
            stop = place.offset_bytes + count * dtype.itemsize
            low, high = found.get(place.region, (start, stop))
            found[place.region] = min(low, start), max(high, stop)
    return found


@dataclass(frozen=True)
class Filling:
    """What a worker has written to a slot.

    Attributes:
        gradients: By parameter, whether it has got one.
        statistics: The heads' places of those that are there.
        others: Those that had no place.
    """

    gradients: tuple[bool, ...]
    statistics: tuple[int, ...]
    others: Statistics

    def read(
        self, slot: Slot | None, heads: Sequence[Head], weight: float
    ) -> tuple[list[Tensor | None], Statistics]:
        """Return gradients and statistics of a microbatch of this weight, in the slot's memory."""
        if slot is None:
            return [None] * len(self.gradients), self.others
        statistics = {
            heads[place].name: Statistic(slot.statistics[place], weight, heads[place].rule)
            for place in self.statistics
        }
        gradients = zip(slot.gradients, self.gradients, strict=True)
        return [g if there else None for g, there in gradients], {**statistics, **self.others}
