"""The collectives of ranks on one host, as steps over their buffers; all call them in one order.

Tensors are flat and contiguous. Data that only moves is taken as bytes, so any dtype can travel.

    all_reduce, one piece, three ranks; each cuts it in three, reduces one part, and puts the result
    where each of the others has published its own:

        rank 0   publishes  · B C    reduces A := a0 + a1 + a2    takes  · B C
        rank 1   publishes  A · C    reduces B                    takes  A · C
        rank 2   publishes  A B ·    reduces C                    takes  A B ·

Small tensors are published whole and reduced by everybody: one wait instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.distributed.collective_buffers import CollectiveBuffers, Steps
from phalanx.distributed.fingerprint import pack
from phalanx.distributed.ops import ReduceOperation
from phalanx.distributed.tensors import as_bytes
from phalanx.errors import ConfigError
from phalanx.memory import copy_to
from phalanx.native import compiled_for
from phalanx.plan import equal_sizes

__all__ = ["IntraHost", "pieces"]

# Dtypes of native_all_reduce.c.
_NATIVE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)


def pieces(num_elements: int, per_piece: int) -> Iterator[slice]:
    """Cut a range into pieces; nothing is one empty piece, so that every operation has one."""
    for start in range(0, max(1, num_elements), per_piece):
        yield slice(start, min(start + per_piece, num_elements))


class IntraHost:
    """The collectives over ``buffers``, whose ranks are on one host.

    Attributes:
        rank: Ours, among them.
        size: How many ranks there are.
        grace_s: How much longer than asked this rank waits for those of its host.
        num_hosts: Of the group, where these ranks are all of it.
    """

    grace_s = 0.0
    num_hosts = 1

    def __init__(self, buffers: CollectiveBuffers) -> None:
        self.rank = buffers.rank
        self.size = buffers.size
        self._buffers = buffers

    def report(self, error: BaseException) -> None:
        """Do nothing: the ranks of one host read errors from the shared status pages."""

    def close(self) -> None:
        """Do nothing: the memory is the group's."""

    def barrier(self) -> Steps:
        """Wait until all ranks have come."""
        return self.agree(pack("barrier", torch.uint8), 0)

    def agree(self, what: int, num_elements: int) -> Steps:
        """Wait until all ranks have come, and see that it is to one operation."""
        buffers = self._buffers
        buffers.begin(what, num_elements)
        yield from buffers.begin_piece()
        buffers.publish()
        yield from buffers.published()
        buffers.end_piece()

    # --- reducing ---------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, reduction: ReduceOperation) -> Steps:
        """Reduce ``flat`` over the ranks, in place and with the same bits on all of them."""
        buffers = self._buffers
        buffers.begin(pack("all_reduce", flat.dtype, reduction=reduction.number), flat.numel())
        sizes, function = buffers.piece_sizes, None
        if reduction.is_plain_sum and flat.dtype in _NATIVE_DTYPES:
            function = compiled_for("all_reduce", flat.dtype)  # without it the pieces are the same
        else:
            sizes = sizes._replace(piece_bytes=buffers.slot_bytes)
        if function is not None and self.size > 1:
            yield from buffers.run_native(function, flat, sizes)
        elif flat.numel() * flat.itemsize <= sizes.whole_bytes:
            yield from self._all_reduce_whole(flat, reduction)
        else:
            yield from self._all_reduce_in_pieces(flat, reduction, sizes.piece_bytes)
        buffers.agree_on_contention()

    def _all_reduce_in_pieces(
        self, flat: Tensor, reduction: ReduceOperation, piece_bytes: int
    ) -> Steps:
        cuts = [
            tuple(equal_sizes(piece.stop - piece.start, self.size))
            for piece in pieces(flat.numel(), piece_bytes // flat.itemsize)
        ]
        parts = flat.split([size for sizes in cuts for size in sizes])  # one call instead of many
        for at, sizes in enumerate(cuts):
            own = parts[at * self.size : (at + 1) * self.size]
            yield from self._all_reduce_piece(own, sizes, reduction)

    def _all_reduce_whole(self, flat: Tensor, reduction: ReduceOperation) -> Steps:
        buffers = self._buffers
        yield from buffers.begin_piece()
        sources = [parts[0] for parts in buffers.cut(flat.dtype, (flat.numel(),))]
        sources[self.rank].copy_(flat)
        buffers.publish()
        yield from buffers.published()
        reduction(sources, flat)
        buffers.end_piece()

    def _all_reduce_piece(
        self,
        parts: Sequence[Tensor],
        sizes: tuple[int, ...],
        reduction: ReduceOperation,
    ) -> Steps:
        buffers = self._buffers
        me, others = self.rank, buffers.pages.others
        mine = parts[me]
        yield from buffers.begin_piece()
        slots = buffers.cut(mine.dtype, sizes)
        own = slots[me]
        for rank in others:
            copy_to(parts[rank], own[rank])
        buffers.publish()
        yield from buffers.published()
        sources = [slot[me] for slot in slots]
        sources[me] = mine
        # In place where the reduction can: what it writes to is in the cache already.
        result = mine if me < 2 else own[me]
        reduction(sources, result)
        copy_to(result, mine)
        for rank in others:
            copy_to(result, slots[rank][me])
        buffers.give_result()
        yield from buffers.results_given()
        for rank in others:
            copy_to(own[rank], parts[rank])
        buffers.end_piece()

    def reduce(self, flat: Tensor, reduction: ReduceOperation, root: int) -> Steps:
        """Reduce ``flat`` over the ranks into that of ``root``; the others keep theirs."""
        buffers = self._buffers
        what = pack("reduce", flat.dtype, reduction=reduction.number, root=root)
        buffers.begin(what, flat.numel())
        for piece in pieces(flat.numel(), buffers.slot_bytes // flat.itemsize):
            part = flat[piece]
            yield from buffers.begin_piece()
            sources = [slot[: part.numel()] for slot in buffers.slots(flat.dtype)]
            if self.rank == root:
                own = sources[root]
                sources[root] = part
                yield from buffers.published()
                reduction(sources, own)
                copy_to(own, part)
            else:
                copy_to(part, sources[self.rank])
                buffers.publish()
            buffers.end_piece()

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], reduction: ReduceOperation
    ) -> Steps:
        """Reduce over the ranks what each holds for this one, into ``output``.

        Args:
            output: Of this rank, as long as its input.
            inputs: One per rank, of any lengths, the same on all ranks.
            reduction: How.
        """
        buffers = self._buffers
        me, dtype = self.rank, output.dtype
        sizes = [len(part) for part in inputs]
        what = pack("reduce_scatter", dtype, reduction=reduction.number, sizes=sizes)
        buffers.begin(what, sum(sizes))
        per_rank = buffers.slot_bytes // dtype.itemsize // self.size
        for piece in pieces(max(sizes), per_rank):
            yield from buffers.begin_piece()
            slots = buffers.slots(dtype)
            own = slots[me]
            for rank, part in enumerate(inputs):
                if rank != me:
                    _put(own, rank * per_rank, part[piece])
            buffers.publish()
            yield from buffers.published()
            mine = inputs[me][piece]
            start = me * per_rank
            sources = [slot[start : start + len(mine)] for slot in slots]
            result = sources[me]
            sources[me] = mine
            reduction(sources, result)
            copy_to(result, output[piece])
            buffers.end_piece()

    # --- moving bytes -----------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int) -> Steps:
        """Give every rank the bytes of ``root``."""
        buffers = self._buffers
        buffers.begin(pack("broadcast", flat.dtype, root=root), flat.numel())
        data = as_bytes(flat)
        for piece in pieces(len(data), buffers.slot_bytes):
            part = data[piece]
            yield from buffers.begin_piece()
            slot = buffers.slots(torch.uint8)[root][: len(part)]
            if self.rank == root:
                copy_to(part, slot)
                buffers.publish()
            else:
                yield from buffers.published([root])
                copy_to(slot, part)
            buffers.end_piece()

    def all_gather(self, outputs: Sequence[Tensor], flat: Tensor) -> Steps:
        """Give every rank the tensors of all, which may differ in length."""
        sizes = [len(output) for output in outputs]
        what = pack("all_gather", flat.dtype, sizes=sizes)
        return self._gather(what, sum(sizes), outputs, flat, None)

    def gather(self, outputs: Sequence[Tensor], flat: Tensor, root: int) -> Steps:
        """Give ``root`` the tensors of all, which have one length; others have no ``outputs``."""
        what = pack("gather", flat.dtype, root=root)
        return self._gather(what, flat.numel(), outputs, flat, root)

    def _gather(
        self,
        what: int,
        num_elements: int,
        outputs: Sequence[Tensor],
        flat: Tensor,
        root: int | None,
    ) -> Steps:
        buffers = self._buffers
        buffers.begin(what, num_elements)
        data, results = as_bytes(flat), [as_bytes(output) for output in outputs]
        longest = max((len(result) for result in results), default=len(data))
        for piece in pieces(longest, buffers.slot_bytes):
            part = data[piece]
            yield from buffers.begin_piece()
            slots = buffers.slots(torch.uint8)
            if self.rank != root:
                _put(slots[self.rank], 0, part)
                buffers.publish()
            if results:
                yield from buffers.published()
            for rank, result in enumerate(results):
                into = result[piece]
                copy_to(part if rank == self.rank else slots[rank][: len(into)], into)
            buffers.end_piece()

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """Give each rank its tensor of ``root``'s; others have no ``inputs``."""
        buffers = self._buffers
        buffers.begin(pack("scatter", output.dtype, root=root), output.numel())
        result, parts = as_bytes(output), [as_bytes(part) for part in inputs]
        per_rank = buffers.slot_bytes // self.size
        for piece in pieces(len(result), per_rank):
            into = result[piece]
            yield from buffers.begin_piece()
            slot = buffers.slots(torch.uint8)[root]
            if self.rank == root:
                for rank, part in enumerate(parts):
                    if rank != root:
                        _put(slot, rank * per_rank, part[piece])
                buffers.publish()
                copy_to(parts[root][piece], into)
            else:
                yield from buffers.published([root])
                at = self.rank * per_rank
                copy_to(slot[at : at + len(into)], into)
            buffers.end_piece()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """Give each rank one tensor of every other; lengths may all differ.

        No rank knows the longest tensor, and so the number of pieces, at first: the lengths go
        round before.

        Raises:
            ConfigError: Somebody sends more or less than the other takes; all ranks raise.
        """
        buffers = self._buffers
        size, me, dtype = self.size, self.rank, outputs[0].dtype
        buffers.begin(pack("all_to_all", dtype), 0)
        yield from buffers.begin_piece()
        lengths = buffers.slots(torch.int64)
        lengths[me][: 2 * size] = torch.tensor(
            [len(part) for part in inputs] + [len(part) for part in outputs]
        )
        buffers.publish()
        yield from buffers.published()
        table = [slot[: 2 * size].tolist() for slot in lengths]
        buffers.end_piece()
        for giver, taker in ((giver, taker) for giver in range(size) for taker in range(size)):
            given, taken = table[giver][taker], table[taker][size + giver]
            if given != taken:
                raise ConfigError(
                    f"`output_split_sizes` must fit what the others send, but rank {giver} sends "
                    f"{given} elements to rank {taker}, which takes {taken}."
                )
        longest = max(max(row[:size]) for row in table) * dtype.itemsize
        sent, got = [as_bytes(part) for part in inputs], [as_bytes(part) for part in outputs]
        per_rank = buffers.slot_bytes // size
        for piece in pieces(longest, per_rank):
            yield from buffers.begin_piece()
            slots = buffers.slots(torch.uint8)
            for rank, part in enumerate(sent):
                if rank != me:
                    _put(slots[me], rank * per_rank, part[piece])
            buffers.publish()
            yield from buffers.published()
            for rank, result in enumerate(got):
                into = result[piece]
                at = me * per_rank
                copy_to(sent[me][piece] if rank == me else slots[rank][at : at + len(into)], into)
            buffers.end_piece()


def _put(slot: Tensor, at: int, part: Tensor) -> None:
    copy_to(part, slot[at : at + len(part)])
