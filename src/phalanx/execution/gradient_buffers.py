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
from phalanx.replicas import Statistic, Statistics, StatisticSpec

__all__ = [
    "LARGE_BYTES",
    "GradientBuffer",
    "GradientBufferLayout",
    "GradientBuffers",
    "WrittenGradients",
]

LARGE_BYTES = 64 << 10
"""Smaller gradients are copied together; larger buffers, seldom written, have no place."""


class GradientBuffer:
    """Shared memory of one microbatch; free again when nobody holds it.

    Attributes:
        gradients: By parameter, in memory order; None for those without elements.
        statistics: By what they are.
    """

    def __init__(
        self, region: int, gradients: list[Tensor | None], statistics: list[Tensor]
    ) -> None:
        self.region = region
        self.gradients = gradients
        self.statistics = statistics


@dataclass(frozen=True)
class GradientBufferLayout:
    """Where things lie in every buffer; the region's number is that of the first one."""

    gradients: list[TensorHandle | None]
    specs: list[StatisticSpec]
    statistics: list[TensorHandle]


class GradientBuffers:
    """Buffers, made when there are none free.

    In a buffer gradients lie as the parameters lie in the pool, so whoever adds what is in two of
    them to the flat gradients, which lie like that, too, can add all of it at once.

    Args:
        specs: What microbatches may leave in buffers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        specs: Sequence[StatisticSpec],
        pool: SharedMemoryPool,
    ) -> None:
        self.pool = pool
        self._parameters = [(p.numel(), p.dtype, pool.handle_of(p)) for p in parameters]
        self._spans = _spans(self._parameters)
        likes = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs]
        told = [0 < like.nbytes <= LARGE_BYTES for like in likes]
        sizes = [stop - start for start, stop in self._spans.values()]
        self._rooms = [
            *(torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes),
            *(like for like, yes in zip(likes, told, strict=True) if yes),
        ]
        self._lock = threading.Lock()
        self._free: list[tuple[int, list[Tensor | None], list[Tensor]]] = []
        region, gradients, statistics = self._make()
        self.layout = GradientBufferLayout(
            [None if g is None else pool.handle_of(g) for g in gradients],
            [spec for spec, yes in zip(specs, told, strict=True) if yes],
            [place for each in statistics if (place := pool.handle_of(each)) is not None],
        )
        self._free.append((region, gradients, statistics))

    def take(self) -> GradientBuffer:
        """Return a free buffer; it is free again when it is collected."""
        with self._lock:
            room = self._free.pop() if self._free else self._make()
        buffer = GradientBuffer(*room)
        weakref.finalize(buffer, self._free.append, room).atexit = False
        return buffer

    def _make(self) -> tuple[int, list[Tensor | None], list[Tensor]]:
        rooms = self.pool.allocate_like(self._rooms)
        places = [self.pool.handle_of(room) for room in rooms]
        number = next((place.region for place in places if place is not None), -1)
        spans = dict(zip(self._spans, rooms, strict=False))
        gradients: list[Tensor | None] = []
        for count, dtype, place in self._parameters:
            if place is None:
                gradients.append(None)
                continue
            start = place.offset_bytes - self._spans[place.region][0]
            own = spans[place.region][start : start + count * dtype.itemsize]
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
class WrittenGradients:
    """What a worker has written to a gradient buffer.

    Attributes:
        gradients: By parameter, whether it has got one.
        statistics: The places of those that are there.
        others: Those that had no place.
    """

    gradients: tuple[bool, ...]
    statistics: tuple[int, ...]
    others: Statistics

    def read(
        self, buffer: GradientBuffer | None, specs: Sequence[StatisticSpec], weight: float
    ) -> tuple[list[Tensor | None], Statistics]:
        """Return what a microbatch of this weight left, in the buffer's memory."""
        if buffer is None:
            return [None] * len(self.gradients), self.others
        statistics = {
            specs[place].name: Statistic(buffer.statistics[place], weight, specs[place].rule)
            for place in self.statistics
        }
        gradients = zip(buffer.gradients, self.gradients, strict=True)
        return [g if there else None for g, there in gradients], {**statistics, **self.others}
