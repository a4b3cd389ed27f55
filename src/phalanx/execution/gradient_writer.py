"""How a worker process copies what a microbatch leaves to its gradient buffer, once it is done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from phalanx.execution.gradient_buffers import LARGE_BYTES, GradientBufferLayout, WrittenGradients
from phalanx.ipc import fail_point
from phalanx.memory import SharedMemoryPool, copy_to
from phalanx.replicas import Statistics
from phalanx.torch_internals import foreach_copy

__all__ = ["GradientWriter"]


@dataclass(frozen=True)
class _Room:
    """A gradient buffer, as a worker sees it.

    Attributes:
        gradients: By parameter; None for those without elements.
        statistics: By what they are.
    """

    gradients: list[Tensor | None]
    statistics: list[Tensor]


class GradientWriter:
    """Writes to gradient buffers, in a worker process."""

    def __init__(self, layout: GradientBufferLayout, pool: SharedMemoryPool) -> None:
        self._layout = layout
        self._pool = pool
        self._places = {spec.name: place for place, spec in enumerate(layout.specs)}
        self._rooms: dict[int, _Room] = {}

    def fill(
        self, region: int, gradients: list[Tensor | None], statistics: Statistics
    ) -> WrittenGradients:
        """Write them to the buffer in ``region``; with one below 0 nobody asked for gradients.

        Args:
            gradients: By parameter, in memory order.
        """
        present = tuple([gradient is not None for gradient in gradients])
        if region < 0:
            return WrittenGradients(present, (), statistics)
        room = self._room(region)
        pairs = [
            (own, gradient)
            for own, gradient in zip(room.gradients, gradients, strict=True)
            if own is not None and gradient is not None
        ]
        placed, others = [], {}
        for name, statistic in statistics.items():
            place = self._places.get(name)
            if place is not None and self._layout.specs[place].fits(statistic):
                placed.append(place)
                pairs.append((room.statistics[place], statistic.value))
            else:
                others[name] = statistic
        half, whole_bytes = len(pairs) // 2, sum([own.nbytes for own, _ in pairs])
        _copy(pairs[:half], whole_bytes)
        fail_point("gradients half written")
        _copy(pairs[half:], whole_bytes)
        fail_point("gradients written")
        return WrittenGradients(present, tuple(placed), others)

    def _room(self, region: int) -> _Room:
        if region not in self._rooms:
            at, layout = self._pool.at, self._layout
            self._rooms[region] = _Room(
                [None if p is None else at(replace(p, region=region)) for p in layout.gradients],
                [at(replace(place, region=region)) for place in layout.statistics],
            )
        return self._rooms[region]


def _copy(pairs: list[tuple[Tensor, Tensor]], whole_bytes: int) -> None:
    rest = []
    for own, value in pairs:
        alike = own.dtype == value.dtype and own.stride() == value.stride()
        if alike and own.nbytes >= LARGE_BYTES:
            copy_to(value, own, whole_bytes=whole_bytes)
        else:
            rest.append((own, value))
    if rest:
        foreach_copy([own for own, _ in rest], [value for _, value in rest])
