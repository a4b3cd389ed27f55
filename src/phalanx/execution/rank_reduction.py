"""Sums over the ranks of a group, in the order of the fixed tree.

    rank 0   microbatches 0 1   sum a |a0|a1|  ──►  rank 0   a0 + b0  ──►  every rank
    rank 1   microbatches 2 3   sum b |b0|b1|  ──►  rank 1   a1 + b1  ──►  |a0 + b0|a1 + b1|
                                      all_to_all                  all_gather

Each rank owns one slice of every bucket of gradients: it receives all partial sums of this slice
and adds them along the tree. That moves as many bytes as an all_reduce, whose order would depend
on the number of ranks. Of two ranks with one sum each, an all_reduce does it: two numbers have one
sum, whichever comes first.

`RankExecutor` sends all buckets after its run. `DistributedDataParallel` also calls `RankSums.put`:
there, a bucket may leave while the rank's last backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from phalanx.distributed import Exchange
from phalanx.errors import StateError
from phalanx.execution.run import Gradients, PartialSum, TreeSums, add_nodes, nodes_of
from phalanx.plan import Node
from phalanx.torch_internals import foreach_copy

_ALIGNMENT = 64  # bytes; as torch's own memory: kernels that sum choose by it
_LARGE_BYTES = 2**20  # of a gradient that travels alone, because a copy costs more
_IDENTITY = -0.0  # added to any number, it gives this number; 0.0 would change the sign of -0.0


class RankReduction:
    """Adds the gradients of all ranks' microbatches, and gives every rank the sums.

    Args:
        parameters: In whose order gradients come and go.
        exchange: The ranks.
        bucket_bytes: About how many bytes of gradients travel together.

    Attributes:
        large: The places of the gradients that travel alone.

    Determinism: the sums are bitwise the same for any number of ranks.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        exchange: Exchange,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self._num_parameters = len(parameters)
        self._exchange = exchange
        buckets = _cut_in_buckets(parameters, bucket_bytes)
        self.large = [first for first, *_ in buckets if _is_large(parameters[first])]
        self._buckets = [_Bucket(parameters, places, exchange.size) for places in buckets]
        self._last: RankSums | None = None

    def begin(self, ranges: Sequence[range]) -> RankSums:
        """Begin a step.

        Args:
            ranges: Which microbatches are whose, by rank.

        Raises:
            StateError: The backward pass before failed after it had sent gradients.
        """
        if self._last is not None and self._last.is_broken:
            raise StateError(
                "All ranks must complete their backward passes, but the last one failed here after "
                "it had sent gradients. Start the job again from its last checkpoint."
            )
        self._last = RankSums(self._num_parameters, self._exchange, self._buckets, ranges)
        return self._last


class RankSums:
    """The sums of one step: buckets travel in the same order on all ranks, each when it is full.

    Args:
        num_parameters: Of the model.
        exchange, buckets, ranges: As `RankReduction` has them.

    Attributes:
        is_broken: Whether other ranks may wait for the rest of the buckets.
    """

    def __init__(
        self,
        num_parameters: int,
        exchange: Exchange,
        buckets: Sequence[_Bucket],
        ranges: Sequence[range],
    ) -> None:
        self.is_broken = False
        self._num_parameters = num_parameters
        self._exchange = exchange
        self._buckets = buckets
        self._num_leaves = sum(map(len, ranges))
        self._nodes = [nodes_of(leaves, self._num_leaves) for leaves in ranges]
        self._own: dict[Node, Gradients] = {
            node: [None] * num_parameters for node in self._nodes[exchange.rank]
        }
        self._full: set[int] = set()
        self._trips: list[_Trip] = []

    @property
    def places(self) -> set[int]:
        """The places of the parameters that this rank has gradients of."""
        return places_of(self._own.values())

    def put(
        self,
        place: int,
        gradient: Tensor | None,
        leaf: Node,
        waiting: Mapping[Node, PartialSum | None],
    ) -> None:
        """Take the gradient of this rank's last microbatch, and send the sum if it is its turn.

        Args:
            place: Of a large gradient.
            gradient: 1-D in memory order. Autograd may still read it, so it is not written to.
                None: the microbatch has none.
            leaf: The microbatch.
            waiting: The sums of the others; those of this gradient are taken out of them.
        """
        sums: TreeSums[Tensor] = TreeSums(self._num_leaves, Tensor.add_)
        for node, each in waiting.items():
            found = None
            if each is not None:
                found, each.gradients[place] = each.gradients[place], None
            sums.put(node, found)
        sums.put(leaf, gradient)
        for node, total in sums.waiting.items():
            if gradient is None or total is not gradient:
                self._own[node][place] = total
            else:
                self._own[node][place] = gradient.clone()
        self._full.add(place)
        self._send(self._full)

    def send(self, own: Mapping[Node, PartialSum | None]) -> None:
        """Send all that is left; ``own`` are this rank's partial sums, which may be written to."""
        for node, found in own.items():
            if found is not None:
                pairs = zip(self._own[node], found.gradients, strict=True)
                self._own[node] = [late if early is None else early for early, late in pairs]
        self._send(None)

    def _send(self, full: set[int] | None) -> None:
        kind = _PairTrip if list(map(len, self._nodes)) == [1, 1] else _Trip
        for bucket in self._buckets[len(self._trips) :]:
            if full is not None and not full.issuperset(bucket.places):
                break
            self.is_broken = True
            sums = list(self._own.values())
            self._trips.append(kind(bucket, self._exchange, self._nodes, sums))

    def receive(self) -> Gradients:
        """Return the sums of all ranks' gradients.

        Returns:
            By parameter, 1-D in memory order; meaningless where no rank has a gradient.
        """
        for trip in self._trips:
            trip.add(self._num_leaves)
        total: Gradients = [None] * self._num_parameters
        for bucket, trip in zip(self._buckets, self._trips, strict=True):
            bucket.read(trip.wait(), total)
        self.is_broken = False
        return total


def places_of(sums: Iterable[Gradients]) -> set[int]:
    """Return the places of the parameters that one of the sums holds a gradient of."""
    return {place for each in sums for place, found in enumerate(each) if found is not None}


class _Trip:
    """The way of one bucket in one step: to the owners of its slices, and back.

    Args:
        nodes: By rank, the nodes of the tree that it has sums of.
        sums: This rank's, by its nodes.
    """

    def __init__(
        self,
        bucket: _Bucket,
        exchange: Exchange,
        nodes: Sequence[Sequence[Node]],
        sums: Sequence[Gradients],
    ) -> None:
        self._exchange = exchange
        self._arriving: dict[Node, Tensor] = {}
        self._waits: list[Callable[[], object]] = []
        self._flat = bucket.empty()  # sent, and then received: the gradients lie in its memory
        num_bytes = self._flat.nbytes // exchange.size
        for turn in range(max(map(len, nodes))):  # most ranks have one node
            sends = turn < len(sums)
            flat = self._flat if turn == 0 else bucket.empty()
            if sends:
                bucket.write(sums[turn], flat)
            senders = [rank for rank, own in enumerate(nodes) if turn < len(own)]
            received = bucket.received(turn, len(senders))
            for rank, part in zip(senders, received, strict=True):
                self._arriving[nodes[rank][turn]] = part
            self._waits.append(
                exchange.start_all_to_all(
                    _bytes_of(flat if sends else flat[:0]),
                    [num_bytes * sends] * exchange.size,
                    _bytes_of(received.view(-1)),
                    [num_bytes * (rank in senders) for rank in range(exchange.size)],
                )
            )

    def add(self, num_leaves: int) -> None:
        """Add what has come of this rank's slice, and begin to give it to all."""
        for wait in self._waits:
            wait()
        total = add_nodes(num_leaves, self._arriving, Tensor.add_)
        assert total is not None  # the nodes of all ranks cover the tree
        self._waits = [self._exchange.start_all_gather(_bytes_of(total), _bytes_of(self._flat))]

    def wait(self) -> Tensor:
        """Return the bucket with the sums."""
        for wait in self._waits:
            wait()
        return self._flat


class _PairTrip(_Trip):
    """The way of one bucket between two ranks with one sum each."""

    def __init__(
        self,
        bucket: _Bucket,
        exchange: Exchange,
        nodes: Sequence[Sequence[Node]],  # noqa: ARG002 - as `_Trip` takes it
        sums: Sequence[Gradients],
    ) -> None:
        self._flat = bucket.flatten(sums[0])
        self._waits = [exchange.start_all_reduce(self._flat)]

    def add(self, num_leaves: int) -> None:
        """Do nothing: the backend adds."""


class _Bucket:
    """Gradients of one dtype that travel together, or one large gradient.

    Attributes:
        places: Of their parameters.
        slice_size: Elements of the slice that each rank owns.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], places: Sequence[int], num_ranks: int
    ) -> None:
        self.places = places
        self.dtype = parameters[places[0]].dtype
        self.device = parameters[places[0]].device
        self._sizes = [parameters[place].numel() for place in places]
        unit = _ALIGNMENT // self.dtype.itemsize
        *self._starts, stop = accumulate(
            (-(-size // unit) * unit for size in self._sizes), initial=0
        )
        self.slice_size = -(-stop // num_ranks)
        self._num_ranks = num_ranks
        self._received: list[Tensor] = []

    def flatten(self, gradients: Gradients) -> Tensor:
        """Return these gradients in one piece of memory: a large one where it lies."""
        flat = self.empty()
        if len(self.places) == 1:
            first = gradients[self.places[0]]
            if first is not None:
                return first
            flat = flat[: self._sizes[0]]  # as long as another rank's gradient
        self.write(gradients, flat)
        return flat

    def empty(self) -> Tensor:
        """Return memory for the bucket."""
        size = self.slice_size * self._num_ranks
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def received(self, turn: int, count: int) -> Tensor:
        """Return memory for ``count`` slices; it is used again in every step."""
        if turn == len(self._received):
            self._received.append(torch.empty(0, dtype=self.dtype, device=self.device))
        if len(self._received[turn]) != count:
            shape = count, self.slice_size
            self._received[turn] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._received[turn]

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return the gradients in ``flat``."""
        pairs = zip(self._starts, self._sizes, strict=True)
        return [flat.narrow(0, start, size) for start, size in pairs]

    def write(self, gradients: Gradients, flat: Tensor) -> None:
        """Write these gradients into the bucket ``flat``."""
        found = [gradients[place] for place in self.places]
        pairs = list(zip(self._views(flat), found, strict=True))
        for view, gradient in pairs:
            if gradient is None:
                (torch.view_as_real(view) if view.is_complex() else view).fill_(_IDENTITY)
        present = [(view, each) for view, each in pairs if each is not None]
        if present:
            foreach_copy([view for view, _ in present], [each for _, each in present])

    def read(self, flat: Tensor, total: Gradients) -> None:
        """Put the gradients in ``flat`` into ``total``."""
        for place, view in zip(self.places, self._views(flat), strict=True):
            total[place] = view


def _cut_in_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[int]]:
    """Return the places of those that are trained, in backward's order, alike ones together.

    Large ones are first, because they are full first: a bucket waits for all of its gradients.
    """
    trained = [each for each in reversed(range(len(parameters))) if parameters[each].requires_grad]
    by_kind: dict[object, list[list[int]]] = {}
    sizes: dict[object, int] = {}
    for place in sorted(trained, key=lambda each: not _is_large(parameters[each])):
        parameter = parameters[place]
        kind = place if _is_large(parameter) else (parameter.dtype, parameter.device)
        buckets = by_kind.setdefault(kind, [])
        if not buckets or sizes[kind] + parameter.nbytes > bucket_bytes:
            buckets.append([])
            sizes[kind] = 0
        buckets[-1].append(place)
        sizes[kind] += parameter.nbytes
    return [bucket for buckets in by_kind.values() for bucket in buckets]


def _is_large(parameter: nn.Parameter) -> bool:
    return parameter.nbytes >= _LARGE_BYTES


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)  # any backend takes these
