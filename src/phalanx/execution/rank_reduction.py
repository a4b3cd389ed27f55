"""Sums over the ranks of a group, in the order of the fixed tree.

    rank 0   microbatches 0 1   sum a |a0|a1|  ──►  rank 0   a0 + b0  ──►  every rank
    rank 1   microbatches 2 3   sum b |b0|b1|  ──►  rank 1   a1 + b1  ──►  |a0 + b0|a1 + b1|
                                      all_to_all                  all_gather

Each rank owns one slice of every bucket of gradients: it receives all partial sums of this slice
and adds them along the tree. That moves as many bytes as an all_reduce, whose order would depend
on the number of ranks. Of two ranks with one sum each, an all_reduce does it: two numbers have one
sum, whichever comes first.

The last bucket also carries which gradients a rank has, and its note: some numbers. A message of
its own would cost far more than its bytes while gradients are on their way.

`RankExecutor` sends all buckets after its run. `DistributedDataParallel` also calls `RankSums.put`:
there, a bucket may leave while the rank's last backward pass still runs, where the group can add it
up meanwhile: on one host, that needs cores which compute nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from phalanx.distributed import Exchange
from phalanx.errors import StateError
from phalanx.execution.run import Gradients, PartialSum, TreeSums, add_nodes, nodes_of
from phalanx.memory import dense_strides
from phalanx.plan import Node
from phalanx.torch_internals import foreach_copy

_ALIGNMENT = 64  # bytes; as torch's own memory: kernels that sum choose by it
_LARGE_BYTES = 2**20  # of a gradient that travels alone, because a copy costs more
_FLOAT64_BYTES = 8
_IDENTITY = -0.0  # added to any number, it gives this number; 0.0 would change the sign of -0.0


class RankReduction:
    """Adds the gradients of all ranks' microbatches, and gives every rank the sums.

    Args:
        parameters: In whose order gradients come and go.
        exchange: The ranks.
        bucket_bytes: About how many bytes of gradients travel together.
        note_size: How many numbers each rank tells the others.

    Attributes:
        large: The places of the gradients that travel alone, because they are there early.

    Determinism: the sums are bitwise the same for any number of ranks.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        exchange: Exchange,
        bucket_bytes: int = 25 * 2**20,
        note_size: int = 0,
    ) -> None:
        self._num_parameters = len(parameters)
        self._exchange = exchange
        self.large, buckets = _cut_in_buckets(parameters, bucket_bytes)
        like: Tensor = torch.empty(0, device=exchange.device)
        if buckets:
            like = parameters[buckets[-1][-1]]
        else:
            buckets.append([])
        buckets[-1].append(len(parameters))
        told = like.new_empty(len(parameters) + exchange.size * note_size * _FLOAT64_BYTES)
        likes = [*parameters, told]
        buckets = [*([place] for place in self.large), *buckets] if told.numel() else []
        self._buckets = [_Bucket(likes, places, exchange.size) for places in buckets]
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
            node: [None] * (num_parameters + 1) for node in self._nodes[exchange.rank]
        }
        self._full: set[int] = set()
        self._trips: list[_Trip] = []

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
            gradient: Laid out as its parameter; autograd may still read it: it is not written to.
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

    def send(self, own: Mapping[Node, PartialSum | None], note: Sequence[float] = ()) -> None:
        """Send all that is left.

        Args:
            own: This rank's partial sums, which may be written to.
            note: What it tells the others.
        """
        for node, found in own.items():
            if found is not None:
                pairs = zip(self._own[node], [*found.gradients, None], strict=True)
                self._own[node] = [late if early is None else early for early, late in pairs]
        if self._own and self._buckets:
            *columns, _ = zip(*self._own.values(), strict=True)
            present = torch.tensor([any(x is not None for x in each) for each in columns])
            notes = torch.zeros(self._exchange.size, len(note), dtype=torch.float64)
            notes[self._exchange.rank] = torch.tensor(note, dtype=torch.float64)
            # Any dtype of a gradient holds a byte, to which the other ranks add nothing.
            told = torch.cat([present.to(torch.uint8), notes.view(torch.uint8).view(-1)])
            own_sums = next(iter(self._own.values()))
            own_sums[-1] = told.to(self._buckets[-1].device, self._buckets[-1].dtype)
        self._send(None)

    def _send(self, full: set[int] | None) -> None:
        kind = _PairTrip if list(map(len, self._nodes)) == [1, 1] else _Trip
        for bucket in self._buckets[len(self._trips) :]:
            if full is not None and not full.issuperset(bucket.places):
                break
            self.is_broken = True
            sums = list(self._own.values())
            self._trips.append(kind(bucket, self._exchange, self._nodes, sums))

    def receive(self) -> tuple[Gradients, list[list[float]]]:
        """Return the sums of all ranks' gradients, and their notes.

        Returns:
            Sums by parameter, laid out as it, None where no rank has a gradient; notes by rank.
        """
        for trip in self._trips:
            trip.add(self._num_leaves)
        total: Gradients = [None] * (self._num_parameters + 1)
        for bucket, trip in zip(self._buckets, self._trips, strict=True):
            bucket.read(trip.wait(), total)
        self.is_broken = False
        *gradients, told = total
        if told is None:
            return gradients, []
        counts, notes = told.real.cpu().tensor_split([self._num_parameters])
        pairs = zip(gradients, counts.tolist(), strict=True)
        numbers = notes.to(torch.uint8).view(torch.float64).tolist()
        length = len(numbers) // self._exchange.size
        return (
            [each if count else None for each, count in pairs],
            [numbers[i * length :][:length] for i in range(self._exchange.size)],
        )


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
        places: Of their parameters; one more than those have stands for which there are.
        slice_size: Elements of the slice that each rank owns.
    """

    def __init__(self, likes: Sequence[Tensor], places: Sequence[int], num_ranks: int) -> None:
        self.places = places
        self.dtype = likes[places[0]].dtype
        self.device = likes[places[0]].device
        self._sizes = [likes[place].numel() for place in places]
        self._layouts = [(likes[place].shape, dense_strides(likes[place])) for place in places]
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
                return first.as_strided((first.numel(),), (1,))
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
        first = flat.storage_offset()
        places = zip(self._layouts, self._starts, strict=True)
        return [flat.as_strided(*layout, first + start) for layout, start in places]

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


def _cut_in_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int
) -> tuple[list[int], list[list[int]]]:
    """Return the places of large ones that travel alone, and of others that travel together.

    Both are in backward's order. A bucket waits for all of its gradients, so the large ones leave
    first, except for the last of all.
    """
    trained = [each for each in reversed(range(len(parameters))) if parameters[each].requires_grad]
    large = [place for place in trained[:-1] if parameters[place].nbytes >= _LARGE_BYTES]
    by_kind: dict[object, list[list[int]]] = {}
    sizes: dict[object, int] = {}
    for place in trained:
        if place in large:
            continue
        parameter = parameters[place]
        kind = parameter.dtype, parameter.device
        buckets = by_kind.setdefault(kind, [])
        if not buckets or sizes[kind] + parameter.nbytes > bucket_bytes:
            buckets.append([])
            sizes[kind] = 0
        buckets[-1].append(place)
        sizes[kind] += parameter.nbytes
    return large, [bucket for buckets in by_kind.values() for bucket in buckets]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)  # any backend takes these
