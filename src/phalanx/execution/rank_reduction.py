"""The sum of all ranks' gradients, each rank its slice of the flat buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.distributed import Exchange
from phalanx.errors import ConfigError
from phalanx.execution.contract import Reduction, RunResult
from phalanx.execution.partial_sums import TreeSums
from phalanx.memory import FlatParameters
from phalanx.plan import Node
from phalanx.torch_internals import foreach_add

__all__ = ["RankReduction", "put_all", "slices_of", "spread"]

T = TypeVar("T")


class RankReduction(Reduction):
    """Sum the ranks' gradients into the flat buffers, each rank its slice.

    Args:
        flat: Parameters and gradients.
        places: Where each of the flat parameters stands among the executor's, or -1.
        counts: Replicas by rank.
        exchange: The job's ranks.
        shares_all: Whether every rank steps all parameters.

    Attributes:
        slices: By rank, its ranges of the segments: (start, stop) each.
    """

    def __init__(
        self,
        flat: FlatParameters,
        places: Sequence[int],
        counts: Sequence[int],
        exchange: Exchange,
        *,
        shares_all: bool = False,
    ) -> None:
        self.shares_all = shares_all
        self._flat = flat
        self._exchange = exchange
        self._places = places
        self.slices = slices_of(flat, counts)
        self._sent = _Buffer(flat, self.slices)

    def take(self, result: RunResult) -> list[int]:
        """Add up this rank's slice, and return which parameters got no gradient from anybody."""
        nodes = [sorted(each) for each in result.absent]
        own = self._exchange.rank
        sums: TreeSums[_Slice] = TreeSums(len(result.results), _add)
        arrived: dict[Node, _Slice] = {}
        for place in range(max(map(len, nodes))):
            senders = [len(each) > place for each in nodes]
            if senders[own]:
                partial = result.sums[nodes[own][place]]
                assert partial is not None
                self._sent.fill([None if p < 0 else partial.gradients[p] for p in self._places])
            buffers = self._swap(senders)
            for rank, buffer in buffers.items():
                node = nodes[rank][place]
                absent = self._in_flat_order(result.absent[rank][node])
                arrived[node] = _Slice(buffer, absent)
        put_all(sums, len(result.results), arrived)
        absent = self._write(sums.operands())
        return sorted(absent)

    def _swap(self, senders: Sequence[bool]) -> dict[int, _Buffer]:
        """Send everyone its slice of what `_sent` holds; return our own slices, by sender."""
        own = self._exchange.rank
        slices = self.slices[own]
        size = _num_bytes(self._flat, slices)
        room = torch.empty(size * sum(senders), dtype=torch.uint8, device=self._sent.device)
        sent = self._sent.bytes if senders[own] else self._sent.bytes[:0]
        sizes = [_num_bytes(self._flat, each) if senders[own] else 0 for each in self.slices]
        self._exchange.swap(sent, sizes, room, [size if sends else 0 for sends in senders])
        ranks = [rank for rank, sends in enumerate(senders) if sends]
        return {
            rank: _Buffer(self._flat, [slices], room[place * size : (place + 1) * size])
            for place, rank in enumerate(ranks)
        }

    def _in_flat_order(self, absent: frozenset[int]) -> frozenset[int]:
        return frozenset(
            index for index, place in enumerate(self._places) if place < 0 or place in absent
        )

    def _write(self, operands: Sequence[_Slice]) -> frozenset[int]:
        """Write the sum to the gradient buffers; return what is missing in it."""
        slices = self.slices[self._exchange.rank]
        if not operands:
            raise ConfigError("A step needs at least one microbatch with rows, but has none.")
        total = operands[0] if len(operands) == 1 else _add(*operands)
        for segment, (start, stop), values in zip(
            self._flat.segments, slices, total.buffer.ranges, strict=True
        ):
            segment.gradients[start:stop].copy_(values)
        return total.absent

    def share(self) -> None:
        """Give all ranks the whole gradient."""
        gradients = [(place, s.gradients) for place, s in enumerate(self._flat.segments)]
        spread(self._exchange, self.slices, gradients)


def spread(
    exchange: Exchange,
    slices: Sequence[Sequence[tuple[int, int]]],
    tensors: Sequence[tuple[int, Tensor]],
) -> None:
    """Give all ranks each owner's slice of tensors: pairs of (segment, tensor as long)."""
    exchange.spread(
        [
            (tensor[slice(*own[place])], rank)
            for rank, own in enumerate(slices)
            for place, tensor in tensors
        ]
    )


def slices_of(flat: FlatParameters, counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return each rank's range of each segment: those of its replicas' parts together."""
    bounds = flat.bounds(sum(counts))
    stops = list(accumulate(counts))
    return [
        [(part[stop - count][0], part[stop - 1][1]) for part in bounds]
        for stop, count in zip(stops, counts, strict=True)
    ]


def _num_bytes(flat: FlatParameters, slices: Sequence[tuple[int, int]]) -> int:
    return sum(
        (stop - start) * segment.values.itemsize
        for segment, (start, stop) in zip(flat.segments, slices, strict=True)
    )


class _Buffer:
    """Bytes that hold slices of all segments, one after the other, for one rank or for each.

    Attributes:
        ranges: The slices as tensors, in that order.
    """

    def __init__(
        self,
        flat: FlatParameters,
        slices: Sequence[Sequence[tuple[int, int]]],
        room: Tensor | None = None,
    ) -> None:
        self.device = flat.segments[0].values.device
        size = sum(_num_bytes(flat, each) for each in slices)
        self.bytes = (
            torch.zeros(size, dtype=torch.uint8, device=self.device) if room is None else room
        )
        self.ranges: list[Tensor] = []
        self._pieces: list[tuple[int, int, int, Tensor]] = []
        at = 0
        for each in slices:
            for segment, (start, stop) in zip(flat.segments, each, strict=True):
                end = at + (stop - start) * segment.values.itemsize
                values = self.bytes[at:end].view(segment.values.dtype)
                self.ranges.append(values)
                self._pieces += segment.pieces(start, stop, values)
                at = end

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients in (1-D, in flat order); None leaves zeros."""
        for index, start, stop, out in self._pieces:
            gradient = gradients[index]
            if gradient is None:
                out.zero_()
            else:
                out.copy_(gradient[start:stop])

    def members(self) -> list[tuple[int, Tensor]]:
        """Return each parameter's part of this, by index."""
        return [(index, out) for index, _, _, out in self._pieces]


@dataclass
class _Slice:
    """One rank's slice of a partial sum, and which parameters have nothing in it."""

    buffer: _Buffer
    absent: frozenset[int]


def _add(left: _Slice, right: _Slice) -> _Slice:
    if not left.absent and not right.absent:
        foreach_add(left.buffer.ranges, right.buffer.ranges)
        return left
    pairs = zip(left.buffer.members(), right.buffer.members(), strict=True)
    for (index, own), (_, other) in pairs:
        if index in left.absent:  # not added to zeros: that would turn -0 into 0
            own.copy_(other)
        elif index not in right.absent:
            own.add_(other)
    return _Slice(left.buffer, left.absent & right.absent)


def put_all(sums: TreeSums[T], num_leaves: int, arrived: Mapping[Node, T]) -> None:
    """Put what has arrived; leaves below none of these nodes had no rows."""
    covered: set[int] = set()
    for node, value in arrived.items():
        covered |= set(range(node.index << node.level, (node.index + 1) << node.level))
        sums.put(node, value)
    for leaf in set(range(num_leaves)) - covered:
        sums.put(Node(0, leaf), None)
