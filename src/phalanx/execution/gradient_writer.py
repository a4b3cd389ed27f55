"""How a worker process writes what a microbatch leaves to a slot.

Large gradients are not written at all: torch is given the slot's own memory for them (`Placement`).
That is foreseen from the microbatch before, so afterwards each is looked at, and those that came to
lie elsewhere are copied. Nobody may notice. What somebody keeps of it for longer, say a hook that
notes gradients, stays theirs: the next microbatch of whatever worker writes to the same slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.execution.gradient_buffers import LARGE_BYTES, Filling, SlotLayout
from phalanx.ipc import reach
from phalanx.memory import (
    Field,
    Placement,
    SharedMemoryPool,
    TensorHandle,
    copy_to,
    give_back_freed_memory,
)
from phalanx.replicas import Statistics

__all__ = ["GradientWriter"]


@dataclass(frozen=True)
class _Room:
    """A slot, as a worker sees it.

    Attributes:
        gradients: By parameter; None for those without elements.
        statistics: By head.
        field: Where torch makes large gradients; None where it cannot be told to.
    """

    gradients: list[Tensor | None]
    statistics: list[Tensor]
    field: Field | None


class GradientWriter:
    """Write to slots, in a worker process."""

    def __init__(self, layout: SlotLayout, shelf: SharedMemoryPool) -> None:
        self._layout = layout
        self._shelf = shelf
        self._heads = {head.name: place for place, head in enumerate(layout.heads)}
        self._rooms: dict[int, _Room] = {}
        large = {
            number: place
            for number, place in enumerate(layout.gradients)
            if place is not None and _nbytes(place) >= LARGE_BYTES and not place.dtype.is_complex
        }
        self._large = list(large)  # parameters, in the order of the places in a field
        self._gave_back = False
        self._placement: Placement | None = None
        if large and Placement.hook():
            offsets = [place.offset_bytes for place in large.values()]
            self._placement = Placement(offsets, [_nbytes(place) for place in large.values()])

    @contextmanager
    def receiving(self, region: int, kind: str) -> Iterator[None]:
        """Let gradients that the body makes come to lie in the slot in ``region``.

        Args:
            region: Below 0 for none.
            kind: Of bodies that do the same.
        """
        field = self._room(region).field if region >= 0 else None
        if field is None or self._placement is None:
            yield
        else:
            with self._placement.within(field, kind):
                yield

    def fill(
        self, region: int, gradients: list[Tensor | None], statistics: Statistics, kind: str
    ) -> Filling:
        """Write them to the slot in ``region``; with one below 0 nobody asked for gradients.

        Args:
            gradients: By parameter, in memory order; in the end nobody else may hold them.
            kind: Of the body that made them.
        """
        present = tuple([gradient is not None for gradient in gradients])
        if region < 0:
            return Filling(present, (), statistics)
        room = self._room(region)
        there = self._made_there(room, gradients, kind)
        pairs = [
            (own, gradient)
            for number, (own, gradient) in enumerate(zip(room.gradients, gradients, strict=True))
            if own is not None and gradient is not None and number not in there
        ]
        placed, others = [], {}
        for name, statistic in statistics.items():
            place = self._heads.get(name)
            if place is not None and self._layout.heads[place].fits(statistic):
                placed.append(place)
                pairs.append((room.statistics[place], statistic.value))
            else:
                others[name] = statistic
        half, whole_bytes = len(pairs) // 2, sum([own.nbytes for own, _ in pairs])
        _copy(pairs[:half], whole_bytes)
        reach("gradients half written")
        _copy(pairs[half:], whole_bytes)
        reach("gradients written")
        return Filling(present, tuple(placed), others)

    def settle(self, region: int) -> None:
        """Leave the slot in ``region`` to others, when nothing of the microbatch is held here."""
        if region < 0 or self._placement is None:
            return
        field = self._room(region).field
        if field is not None and field.taken():
            self._part(field)

    def _made_there(self, room: _Room, gradients: list[Tensor | None], kind: str) -> set[int]:
        """Return which gradients lie where they should; the places of others are free then."""
        field, placement = room.field, self._placement
        if field is None or placement is None:
            return set()
        found = [_address(gradients[number]) for number in self._large]
        pairs = zip(self._large, found, field.addresses, strict=True)
        there = {number for number, address, own in pairs if address == own}
        if len(there) < sum([address != 0 for address in found]):
            placement.learn(kind, found)
        elif there and not self._gave_back:
            self._gave_back = True
            give_back_freed_memory()  # where the first gradients lay
        if field.taken() > len(there):
            for number, gradient in enumerate(gradients):
                if number not in there and gradient is not None:
                    gradients[number] = gradient.clone()  # it may lie in another one's place
            gradient = None
            if field.taken() > len(there):
                self._part(field)
        return there

    def _part(self, field: Field) -> None:
        """Leave a field to those who keep tensors in it, and place none any more."""
        field.part()
        self._placement = None

    def _room(self, region: int) -> _Room:
        if region not in self._rooms:
            at, layout, placement = self._shelf.at, self._layout, self._placement
            self._rooms[region] = _Room(
                [None if p is None else at(replace(p, region=region)) for p in layout.gradients],
                [at(replace(place, region=region)) for place in layout.statistics],
                None if placement is None else self._shelf.field(region, placement),
            )
        return self._rooms[region]


def _nbytes(place: TensorHandle) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


def _address(gradient: Tensor | None) -> int:
    """Return where its very numbers lie; 0 if there are none in memory."""
    if type(gradient) is not Tensor or gradient.is_neg():
        return 0
    return gradient.data_ptr()


def _copy(pairs: list[tuple[Tensor, Tensor]], whole_bytes: int) -> None:
    rest = []
    for own, value in pairs:
        alike = own.dtype == value.dtype and own.stride() == value.stride()
        if alike and own.nbytes >= LARGE_BYTES:
            copy_to(value, own, whole_bytes=whole_bytes)
        else:
            rest.append((own, value))
    if rest:
        torch._foreach_copy_([own for own, _ in rest], [value for _, value in rest])
