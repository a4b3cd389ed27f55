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


@dataclass(eq=False)
class GradientBuffer:
    """Shared memory of one microbatch; free again when nobody holds it.

    Attributes:
        gradients: By parameter, in memory order; None for those without elements.
        statistics: By what they are.
    """

    region: int
    gradients: list[Tensor | None]
    statistics: list[Tensor]


@dataclass(frozen=True)
class GradientBufferLayout:
    """Where things lie in every buffer; the region's number is that of the first one."""

    gradients: list[TensorHandle | None]
    specs: list[StatisticSpec]
    statistics: list[TensorHandle]


class GradientBuffers:
    """Buffers, made when there are none free.

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
        likes = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs]
        told = [0 < like.nbytes <= LARGE_BYTES for like in likes]
        self._num_parameters = len(parameters)
        self._rooms = [
            *(torch.empty(p.numel(), dtype=p.dtype, device="meta") for p in parameters),
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
        count = self._num_parameters
        gradients = [room if room.numel() else None for room in rooms[:count]]
        return number, gradients, rooms[count:]


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
