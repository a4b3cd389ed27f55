"""Partial sums of ranks, added where their parameters are stepped.

    rank 0   microbatches 0 1 2 3   sum a |w0 w2|w1 b0|     w0 w2 of a + b at rank 0
    rank 1   microbatches 4 5 6 7   sum b |w0 w2|w1 b0|     w1 b0 of a + b at rank 1

Each rank owns some parameters: it is sent every rank's partial sums of these, adds them along the
tree, steps them, and gives all ranks the new values. It alone keeps their state (ZeRO, stage 1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.distributed import Exchange
from phalanx.execution.partial_sums import PartialSum, RunResult, TreeSums, add_sums
from phalanx.execution.rank_messages import RankMessage
from phalanx.execution.shards import Shards, share_by_size
from phalanx.ipc import aligned
from phalanx.memory import dense_strides
from phalanx.plan import Node

__all__ = ["RankShards", "RankSums"]


class RankSums:
    """The exchange of partial sums, and of what their owners make of them.

    Args:
        parameters: The executor's.
        counts: Replicas by rank.
        exchange: The job's ranks.

    Attributes:
        shares: By rank and replica, the places of the parameters that it owns.
        owned: By rank.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], counts: Sequence[int], exchange: Exchange
    ) -> None:
        self.exchange = exchange
        self._parameters = parameters
        trained = [place for place, each in enumerate(parameters) if each.requires_grad]
        shares = [
            [trained[index] for index in share]
            for share in share_by_size([parameters[place] for place in trained], sum(counts))
        ]
        stops = list(accumulate(counts))
        self.shares = [
            shares[stop - count : stop] for stop, count in zip(stops, counts, strict=True)
        ]
        self.owned = [sorted(chain.from_iterable(each)) for each in self.shares]
        self._layout = _Layout(parameters, self.owned)

    @property
    def rank(self) -> int:
        """Ours."""
        return self.exchange.rank

    def add(self, result: RunResult, messages: Sequence[RankMessage]) -> None:
        """Add all ranks' partial sums of what this rank owns, but for the last addition.

        Args:
            result: Of this rank's microbatches; it comes to hold the sums of all.
            messages: What each rank has told of its sums.
        """
        absents = [absent for message in messages for absent in message.absent.values()]
        result.missing = frozenset.intersection(*absents) if absents else frozenset()
        layout = self._layout.without(result.missing)
        sums: TreeSums[PartialSum] = TreeSums(len(result.results), add_sums)
        arrived: dict[Node, PartialSum] = {}
        nodes = [sorted(message.absent) for message in messages]
        for turn in range(max(map(len, nodes))):
            sent = {rank: each[turn] for rank, each in enumerate(nodes) if turn < len(each)}
            own = result.sums[sent[self.rank]] if self.rank in sent else None
            for rank, gradients in self._swap(layout, own, list(sent)).items():
                node, message = sent[rank], messages[rank]
                for place in message.absent[node]:
                    gradients[place] = None
                arrived[node] = PartialSum(gradients, message.statistics[node])
        _put_all(sums, len(result.results), arrived)
        result.sums = sums.waiting()

    def _swap(
        self, layout: _Layout, own: PartialSum | None, senders: Sequence[int]
    ) -> dict[int, list[Tensor | None]]:
        """Send each rank its part of ``own``; return our parts of what others send, by sender."""
        size = layout.num_bytes[self.rank]
        room = torch.empty(size * len(senders), dtype=torch.uint8, device=layout.device)
        if layout.room.numel():  # else there are no gradients, as in an evaluation
            sent, sizes = layout.room[:0], [0] * len(layout.num_bytes)
            if own is not None:
                layout.fill([own.gradients[place] for place in layout.places])
                sent, sizes = layout.room, layout.num_bytes
            received = [size if rank in senders else 0 for rank in range(len(sizes))]
            self.exchange.swap(sent, sizes, room, received)
        return {
            rank: layout.views(self.rank, room[index * size : (index + 1) * size])
            for index, rank in enumerate(senders)
        }

    def spread(self, values: Mapping[int, Tensor], missing: frozenset[int]) -> dict[int, Tensor]:
        """Return all ranks' values, of which ``values`` are ours; 1-D, in memory order.

        Args:
            missing: Places that nobody has a value for.
        """
        layout = self._layout.without(missing)
        layout.fill([values.get(place) for place in layout.places])
        self.exchange.spread(
            [(part, rank) for rank, part in enumerate(layout.room.split(layout.num_bytes))]
        )
        return dict(zip(layout.places, layout.all_views, strict=True))


class _Layout:
    """Where values of parameters lie in a message: those of rank 0, then those of rank 1, ….

    Args:
        parameters: The executor's.
        by_rank: The places of those that are in it.

    Attributes:
        places: All of them, in the order of the message.
        num_bytes: By rank.
        room: A message.
        all_views: Its parts by parameter, 1-D.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], by_rank: Sequence[Sequence[int]]
    ) -> None:
        self._parameters = parameters
        self._by_rank = by_rank
        self._other: tuple[frozenset[int], _Layout] = frozenset(), self
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.places = list(chain.from_iterable(by_rank))
        self.num_bytes = [sum(_size_of(parameters[p]) for p in places) for places in by_rank]
        self.room = torch.zeros(sum(self.num_bytes), dtype=torch.uint8, device=self.device)
        self.all_views = list(self._cut(self.room, self.places))

    def without(self, missing: frozenset[int]) -> _Layout:
        """Return the layout of the others; mostly it is the one of the time before."""
        if not missing:
            return self
        if self._other[0] != missing:
            left = [[p for p in places if p not in missing] for places in self._by_rank]
            self._other = missing, _Layout(self._parameters, left)
        return self._other[1]

    def _cut(self, room: Tensor, places: Iterable[int]) -> Iterable[Tensor]:
        at = 0
        for place in places:
            parameter = self._parameters[place]
            yield room[at : at + parameter.numel() * parameter.itemsize].view(parameter.dtype)
            at += _size_of(parameter)

    def views(self, rank: int, room: Tensor) -> list[Tensor | None]:
        """Return the parts of one rank's bytes, by place; None for those of others."""
        found: list[Tensor | None] = [None] * len(self._parameters)
        places = self._by_rank[rank]
        for place, view in zip(places, self._cut(room, places), strict=True):
            found[place] = view
        return found

    def fill(self, values: Sequence[Tensor | None]) -> None:
        """Write a message; what is None stays as it is, and nobody reads it."""
        for view, value in zip(self.all_views, values, strict=True):
            if value is not None:
                view.copy_(value)


def _size_of(parameter: Tensor) -> int:
    return aligned(parameter.numel() * parameter.itemsize)


class RankShards(Shards):
    """An optimizer in shards, of which each rank steps those of the parameters that it owns.

    Args:
        optimizer, parameters: As for `Shards`.
        sums: Who owns which parameter.
        keeps_all: Every rank steps all parameters, and has all of the state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        sums: RankSums,
        *,
        keeps_all: bool,
    ) -> None:
        own = sums.shares[sums.rank]
        super().__init__(optimizer, parameters, len(own))
        self._sums = sums
        self._keeps_all = keeps_all
        self._added = [[place for place in share if place in self._group_of] for share in own]
        if not keeps_all:
            self._stepped = self._added
        self._missing: frozenset[int] = frozenset()
        self._is_partial = False  # whether owners alone have the state of their parameters

    def take(self, result: RunResult) -> None:
        """Take over the sums of a run and the options of now."""
        self._missing = result.missing
        super().take(result)
        if not self._parts:
            self.gather_state()
        self.adds_first = self._keeps_all or not self._parts

    def gather_gradients(self) -> None:
        """Bring all gradients here, where every rank steps all parameters."""
        if self.adds_first:
            own = self._sums.owned[self._sums.rank]
            values = {place: each for place in own if (each := self._left[place]) is not None}
            for place, value in self._sums.spread(values, self._missing).items():
                self._left[place] = value

    def total(self, squares: Sequence[float]) -> float:
        """Return the sum of the squares of all shards of all ranks."""
        packed = json.dumps(list(squares)).encode()
        told = self._sums.exchange.gather(packed, "clip gradients")
        return super().total(list(chain.from_iterable(map(json.loads, told))))

    def finish(self) -> None:
        """Give all ranks the new values."""
        super().finish()
        if self.adds_first:
            return
        own, nobody = self._sums.owned[self._sums.rank], frozenset[int]()
        with torch.no_grad():
            values = {place: _dense(self._parameters[place]) for place in own}
            for place, value in self._sums.spread(values, nobody).items():
                parameter = self._parameters[place]
                if place not in values:
                    parameter.copy_(value.as_strided(parameter.shape, self._strides[place]))
        for place in self._group_of.keys() - values.keys():
            self.optimizer.state.pop(self._parameters[place], None)
        self._is_partial = True

    def gather_state(self) -> None:
        """Bring all of the optimizer's state to every rank."""
        if not self._is_partial:
            return
        own = self._sums.owned[self._sums.rank]
        state = self.optimizer.state
        packed = [
            (place, _state_as_json(state[self._parameters[place]]))
            for place in own
            if self._parameters[place] in state
        ]
        exchange = self._sums.exchange
        told = exchange.gather(json.dumps(packed).encode(), "gather the optimizer")
        spread: list[tuple[Tensor, int]] = []
        for rank, document in enumerate(told):
            for place, entries in json.loads(document):
                parameter = self._parameters[place]
                if rank != self._sums.rank:
                    state[parameter] = {
                        k: _state_from_json(each, parameter) for k, each in entries.items()
                    }
                spread += [
                    (each, rank)
                    for key in entries
                    if isinstance(each := state[parameter][key], Tensor) and each.dim()
                ]
        _spread_in_place(exchange, spread)
        self._sort_state()
        self._is_partial = False


def _dense(tensor: Tensor) -> Tensor:
    """Return the elements in one run, in the order of their memory."""
    dense = tensor if tensor.stride() == dense_strides(tensor) else tensor.clone()
    return dense.detach().as_strided((tensor.numel(),), (1,))


def _spread_in_place(exchange: Exchange, tensors: Sequence[tuple[Tensor, int]]) -> None:
    """Make each tensor everywhere what it is at its owner."""
    runs = [(_dense(tensor), rank) for tensor, rank in tensors]
    exchange.spread(runs)
    for (tensor, rank), (run, _) in zip(tensors, runs, strict=True):
        if rank != exchange.rank and run.data_ptr() != tensor.data_ptr():
            tensor.copy_(run.as_strided(tensor.shape, dense_strides(tensor)))


# Any, here and below: what optimizers keep.
def _state_as_json(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return, as JSON, what makes a parameter's state but for the elements of its tensors."""
    return {
        key: [
            str(value.dtype).removeprefix("torch."),
            value.device.type,
            list(value.shape),
            None if value.dim() else value.item(),
        ]
        if isinstance(value, Tensor)
        else {"is": value}
        for key, value in entries.items()
    }


def _state_from_json(described: Any, parameter: Tensor) -> Any:
    if isinstance(described, dict):
        return described["is"]
    name, device_type, shape, value = described
    dtype = getattr(torch, name)
    device = parameter.device if device_type == parameter.device.type else torch.device(device_type)
    if value is not None:
        return torch.tensor(value, dtype=dtype, device=device)
    if tuple(shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=device)


def _put_all(
    sums: TreeSums[PartialSum], num_leaves: int, arrived: Mapping[Node, PartialSum]
) -> None:
    """Put what has arrived; leaves below none of these nodes had no rows."""
    covered: set[int] = set()
    for node, value in arrived.items():
        covered |= set(range(node.index << node.level, (node.index + 1) << node.level))
        sums.put(node, value)
    for leaf in set(range(num_leaves)) - covered:
        sums.put(Node(0, leaf), None)
