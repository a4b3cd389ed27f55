"""Shared memory for the results of one microbatch: its gradients, and the statistics of buffers.

Every slot is one region with the same layout, so an answer only says which parts were written.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.ipc import aligned, fail_point
from phalanx.memory import SharedMemoryPool, TensorHandle, copy_to
from phalanx.replicas import Statistic, Statistics, StatisticSpec
from phalanx.torch_internals import foreach_copy

__all__ = ["GradientSlot", "GradientSlots", "SlotLayout", "SlotWriter", "WrittenGradients"]

_LARGE_BYTES = 64 << 10  # smaller gradients are copied together; larger statistics have no place
_MOVED_BYTES = 1 << 20  # a hook takes 13 µs, which counts beside the copy of a smaller gradient


@dataclass(eq=False)
class GradientSlot:
    """Shared memory of one microbatch; free again when nobody holds it.

    Attributes:
        gradients: By parameter, in memory order; None for those without elements.
        statistics: In the order of the layout's specs.
    """

    region: int
    gradients: list[Tensor | None]
    statistics: list[Tensor]


class SlotLayout:
    """The places in every slot, as if it were region 0.

    Args:
        specs: The statistics that microbatches may leave in buffers.

    Attributes:
        specs: Those that have a place: small ones, which are written at each microbatch.
        nbytes: The size of a slot.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], specs: Sequence[StatisticSpec]) -> None:
        self.nbytes = 0
        self._gradients = [self._place(p.dtype, (p.numel(),)) for p in parameters]
        sizes = [torch.empty(s.shape, dtype=s.dtype, device="meta").nbytes for s in specs]
        both = zip(specs, sizes, strict=True)
        self.specs = [spec for spec, size in both if 0 < size <= _LARGE_BYTES]
        self._statistics = [self._place(spec.dtype, spec.shape) for spec in self.specs]

    def _place(self, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorHandle:
        like = torch.empty(shape, dtype=dtype, device="meta")
        start, self.nbytes = self.nbytes, self.nbytes + aligned(like.nbytes)
        return TensorHandle(0, start, dtype, shape, like.stride())

    def slot(self, region: int, pool: SharedMemoryPool) -> GradientSlot:
        """Return the slot in this region of the pool."""

        def at(place: TensorHandle) -> Tensor:
            return pool.at(replace(place, region=region))

        gradients = [at(place) if place.shape[0] else None for place in self._gradients]
        return GradientSlot(region, gradients, [at(place) for place in self._statistics])


class GradientSlots:
    """The slots of an executor, made when none is free."""

    def __init__(self, layout: SlotLayout, pool: SharedMemoryPool) -> None:
        self.layout = layout
        self._pool = pool
        self._lock = threading.Lock()
        self._free: list[GradientSlot] = []

    def take(self) -> GradientSlot:
        """Return a free slot; it is free again when it is collected."""
        with self._lock:
            kept = self._free.pop() if self._free else self._made()
        slot = replace(kept)
        weakref.finalize(slot, self._free.append, kept).atexit = False
        return slot

    def _made(self) -> GradientSlot:
        place = self._pool.allocate(max(1, self.layout.nbytes))
        return self.layout.slot(place.region, self._pool)


@dataclass(frozen=True)
class WrittenGradients:
    """The parts of a slot that a worker has written.

    Attributes:
        gradients: By parameter, whether it has got one.
        statistics: The places of those that are there.
        others: Those that had no place.
    """

    gradients: tuple[bool, ...]
    statistics: tuple[int, ...]
    others: Statistics

    def read(
        self, slot: GradientSlot | None, specs: Sequence[StatisticSpec], weight: float
    ) -> tuple[list[Tensor | None], Statistics]:
        """Return the gradients and statistics of a microbatch of this weight, in the slot."""
        if slot is None:
            return [None] * len(self.gradients), self.others
        statistics = {
            specs[place].name: Statistic(slot.statistics[place], weight, specs[place].rule)
            for place in self.statistics
        }
        gradients = zip(slot.gradients, self.gradients, strict=True)
        return [g if there else None for g, there in gradients], {**statistics, **self.others}


class SlotWriter:
    """Writes to slots, in a worker process.

    A large gradient moves to the slot as soon as autograd has accumulated it: else the worker would
    hold all gradients of the model twice.

    Args:
        leaves: The parameters of the replica, which get the gradients.
    """

    def __init__(
        self, layout: SlotLayout, pool: SharedMemoryPool, leaves: Sequence[Tensor]
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._places = {spec.name: place for place, spec in enumerate(layout.specs)}
        self._slots: dict[int, GradientSlot] = {}
        self._slot: GradientSlot | None = None
        for place, leaf in enumerate(leaves):
            if leaf.requires_grad and leaf.nbytes >= _MOVED_BYTES:
                leaf.register_post_accumulate_grad_hook(partial(self._move, place))

    def begin(self, region: int) -> None:
        """Write to the slot in ``region`` from now on; below 0, nobody asks for gradients."""
        if region >= 0 and region not in self._slots:
            self._slots[region] = self._layout.slot(region, self._pool)
        self._slot = self._slots.get(region)

    def _move(self, place: int, leaf: Tensor) -> None:
        target = None if self._slot is None else self._slot.gradients[place]
        gradient = leaf.grad
        if target is None or gradient is None or gradient.requires_grad:
            return
        if gradient.stride() == leaf.stride() and gradient.dtype == target.dtype:
            own = target.as_strided(leaf.shape, leaf.stride())
            if own.data_ptr() != gradient.data_ptr():  # else more was added to it
                copy_to(gradient, own)
                leaf.grad = own

    def finish(
        self, gradients: Sequence[Tensor | None], statistics: Statistics
    ) -> WrittenGradients:
        """Write what is not in the slot yet.

        Args:
            gradients: By parameter, in memory order.
        """
        present = tuple([gradient is not None for gradient in gradients])
        slot = self._slot
        if slot is None:
            return WrittenGradients(present, (), statistics)
        pairs = [
            (own, gradient)
            for own, gradient in zip(slot.gradients, gradients, strict=True)
            if own is not None and gradient is not None and own.data_ptr() != gradient.data_ptr()
        ]
        placed, others = [], {}
        for name, statistic in statistics.items():
            place = self._places.get(name)
            if place is not None and self._layout.specs[place].fits(statistic):
                placed.append(place)
                pairs.append((slot.statistics[place], statistic.value))
            else:
                others[name] = statistic
        half, whole_bytes = len(pairs) // 2, sum([own.nbytes for own, _ in pairs])
        _copy(pairs[:half], whole_bytes)
        fail_point("gradients half written")
        _copy(pairs[half:], whole_bytes)
        fail_point("gradients written")
        return WrittenGradients(present, tuple(placed), others)


def _copy(pairs: list[tuple[Tensor, Tensor]], whole_bytes: int) -> None:
    rest = []
    for own, value in pairs:
        alike = own.dtype == value.dtype and own.stride() == value.stride()
        if alike and own.nbytes >= _LARGE_BYTES:
            copy_to(value, own, whole_bytes=whole_bytes)
        else:
            rest.append((own, value))
    if rest:
        foreach_copy([own for own, _ in rest], [value for _, value in rest])
