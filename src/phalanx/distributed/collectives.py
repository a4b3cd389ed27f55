"""The collectives, as steps over the group's buffers. Every rank calls them in the same order.

Tensors are flat and contiguous. What only moves is taken as bytes, so every dtype can travel.

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
from phalanx.errors import ConfigError
from phalanx.memory import compiled_for, copy_to
from phalanx.plan import equal_sizes

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "as_bytes",
    "barrier",
    "broadcast",
    "gather",
    "pieces",
    "reduce",
    "reduce_scatter",
    "scatter",
]

# Dtypes of native_all_reduce.c.
_NATIVE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)


def as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a flat contiguous tensor."""
    # Of none or one element, torch takes any stride for contiguous, but not for a view.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def pieces(num_elements: int, per_piece: int) -> Iterator[slice]:
    """Cut a range into pieces; nothing is one empty piece, so that every operation has one."""
    for start in range(0, max(1, num_elements), per_piece):
        yield slice(start, min(start + per_piece, num_elements))


def barrier(buffers: CollectiveBuffers) -> Steps:
    """Wait until all ranks have come."""
    buffers.begin(pack("barrier", torch.uint8), 0)
    yield from buffers.begin_piece()
    buffers.publish()
    yield from buffers.published()
    buffers.end_piece()


# --- reducing -------------------------------------------------------------------------------------


def all_reduce(buffers: CollectiveBuffers, flat: Tensor, reduction: ReduceOperation) -> Steps:
    """Reduce ``flat`` over the ranks, in place and with the same bits on all of them."""
    buffers.begin(pack("all_reduce", flat.dtype, reduction=reduction.number), flat.numel())
    sizes, function = buffers.piece_sizes, None
    if reduction.is_plain_sum and flat.dtype in _NATIVE_DTYPES:
        function = compiled_for("all_reduce", flat.dtype)  # ranks without it cut in the same pieces
    else:
        sizes = sizes._replace(piece_bytes=buffers.slot_bytes)
    if function is not None and buffers.size > 1:
        yield from buffers.run_native(function, flat, sizes)
    elif flat.numel() * flat.itemsize <= sizes.whole_bytes:
        yield from _all_reduce_whole(buffers, flat, reduction)
    else:
        yield from _all_reduce_in_pieces(buffers, flat, reduction, sizes.piece_bytes)
    buffers.agree_on_contention()


def _all_reduce_in_pieces(
    buffers: CollectiveBuffers, flat: Tensor, reduction: ReduceOperation, piece_bytes: int
) -> Steps:
    cuts = [
        tuple(equal_sizes(piece.stop - piece.start, buffers.size))
        for piece in pieces(flat.numel(), piece_bytes // flat.itemsize)
    ]
    parts = flat.split([size for sizes in cuts for size in sizes])  # one call instead of many
    for at, sizes in enumerate(cuts):
        own = parts[at * buffers.size : (at + 1) * buffers.size]
        yield from _all_reduce_piece(buffers, own, sizes, reduction)


def _all_reduce_whole(
    buffers: CollectiveBuffers, flat: Tensor, reduction: ReduceOperation
) -> Steps:
    yield from buffers.begin_piece()
    sources = buffers.heads(flat.dtype, flat.numel())
    sources[buffers.rank].copy_(flat)
    buffers.publish()
    yield from buffers.published()
    reduction(sources, flat)
    buffers.end_piece()


def _all_reduce_piece(
    buffers: CollectiveBuffers,
    parts: Sequence[Tensor],
    sizes: tuple[int, ...],
    reduction: ReduceOperation,
) -> Steps:
    me, others = buffers.rank, buffers.pages.others
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


def reduce(
    buffers: CollectiveBuffers, flat: Tensor, reduction: ReduceOperation, root: int
) -> Steps:
    """Reduce ``flat`` over the ranks into that of ``root``; the others keep theirs."""
    what = pack("reduce", flat.dtype, reduction=reduction.number, root=root)
    buffers.begin(what, flat.numel())
    for piece in pieces(flat.numel(), buffers.slot_bytes // flat.itemsize):
        part = flat[piece]
        yield from buffers.begin_piece()
        sources = [slot[: part.numel()] for slot in buffers.slots(flat.dtype)]
        if buffers.rank == root:
            own = sources[root]
            sources[root] = part
            yield from buffers.published()
            reduction(sources, own)
            copy_to(own, part)
        else:
            copy_to(part, sources[buffers.rank])
            buffers.publish()
        buffers.end_piece()


def reduce_scatter(
    buffers: CollectiveBuffers, output: Tensor, inputs: Sequence[Tensor], reduction: ReduceOperation
) -> Steps:
    """Reduce over the ranks what each holds for this one, into ``output``.

    Args:
        buffers: The group's.
        output: Of this rank, as long as its input.
        inputs: One per rank, of any lengths, the same on all ranks.
        reduction: How.
    """
    me, dtype = buffers.rank, output.dtype
    what = pack("reduce_scatter", dtype, reduction=reduction.number)
    buffers.begin(what, sum(len(part) for part in inputs))
    per_rank = buffers.slot_bytes // dtype.itemsize // buffers.size
    for piece in pieces(max(len(part) for part in inputs), per_rank):
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


# --- moving bytes ---------------------------------------------------------------------------------


def _put(slot: Tensor, at: int, part: Tensor) -> None:
    copy_to(part, slot[at : at + len(part)])


def broadcast(buffers: CollectiveBuffers, flat: Tensor, root: int) -> Steps:
    """Give every rank the bytes of ``root``."""
    buffers.begin(pack("broadcast", flat.dtype, root=root), flat.numel())
    data = as_bytes(flat)
    for piece in pieces(len(data), buffers.slot_bytes):
        part = data[piece]
        yield from buffers.begin_piece()
        slot = buffers.slots(torch.uint8)[root][: len(part)]
        if buffers.rank == root:
            copy_to(part, slot)
            buffers.publish()
        else:
            yield from buffers.published([root])
            copy_to(slot, part)
        buffers.end_piece()


def all_gather(buffers: CollectiveBuffers, outputs: Sequence[Tensor], flat: Tensor) -> Steps:
    """Give every rank the tensors of all, which may differ in length."""
    return _gather(buffers, "all_gather", sum(map(len, outputs)), outputs, flat, None)


def gather(buffers: CollectiveBuffers, outputs: Sequence[Tensor], flat: Tensor, root: int) -> Steps:
    """Give ``root`` the tensors of all, which have one length; others have no ``outputs``."""
    return _gather(buffers, "gather", flat.numel(), outputs, flat, root)


def _gather(
    buffers: CollectiveBuffers,
    kind: str,
    num_elements: int,
    outputs: Sequence[Tensor],
    flat: Tensor,
    root: int | None,
) -> Steps:
    buffers.begin(pack(kind, flat.dtype, root=root), num_elements)
    data, results = as_bytes(flat), [as_bytes(output) for output in outputs]
    longest = max((len(result) for result in results), default=len(data))
    for piece in pieces(longest, buffers.slot_bytes):
        part = data[piece]
        yield from buffers.begin_piece()
        slots = buffers.slots(torch.uint8)
        if buffers.rank != root:
            _put(slots[buffers.rank], 0, part)
            buffers.publish()
        if results:
            yield from buffers.published()
        for rank, result in enumerate(results):
            into = result[piece]
            copy_to(part if rank == buffers.rank else slots[rank][: len(into)], into)
        buffers.end_piece()


def scatter(
    buffers: CollectiveBuffers, output: Tensor, inputs: Sequence[Tensor], root: int
) -> Steps:
    """Give each rank its tensor of ``root``'s; others have no ``inputs``."""
    buffers.begin(pack("scatter", output.dtype, root=root), output.numel())
    result, parts = as_bytes(output), [as_bytes(part) for part in inputs]
    per_rank = buffers.slot_bytes // buffers.size
    for piece in pieces(len(result), per_rank):
        into = result[piece]
        yield from buffers.begin_piece()
        slot = buffers.slots(torch.uint8)[root]
        if buffers.rank == root:
            for rank, part in enumerate(parts):
                if rank != root:
                    _put(slot, rank * per_rank, part[piece])
            buffers.publish()
            copy_to(parts[root][piece], into)
        else:
            yield from buffers.published([root])
            at = buffers.rank * per_rank
            copy_to(slot[at : at + len(into)], into)
        buffers.end_piece()


def all_to_all(
    buffers: CollectiveBuffers, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Steps:
    """Give each rank one tensor of every other; lengths may all differ.

    Nobody knows the longest of the tensors at first, and so how many pieces there are: the lengths
    go round before.

    Raises:
        ConfigError: Somebody sends more or less than the other takes; all ranks raise.
    """
    size, me, dtype = buffers.size, buffers.rank, outputs[0].dtype
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
