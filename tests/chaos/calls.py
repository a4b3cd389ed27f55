"""Collective calls whose results tell whose numbers they were made of, and of which call.

Numbers are whole and small, so that every order of adding gives the same bits; they differ from
call to call, so that what an older call has left in memory is not taken for a result.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One collective call, the same on all ranks.

    Attributes:
        kind: Its name in `KINDS`.
        number: The how-manieth it is.
        length: Elements of each tensor.
        size: Ranks.
        root: Of calls that have one.
    """

    kind: str
    number: int
    length: int
    size: int
    root: int = 1

    def is_right(self, rank: int) -> bool:
        """Make the call as ``rank``, and tell whether its result is what it must be."""
        return KINDS[self.kind](self, rank)

    def numbers(self, rank: int, to: int = 0) -> Tensor:
        """Return what ``rank`` gives, to rank ``to`` where that matters."""
        start = 1 + self.number % 1000 + 7 * rank + 31 * to
        return torch.arange(start, start + self.length, dtype=torch.float32)

    def total(self, to: int = 0) -> Tensor:
        """Return the sum over the ranks."""
        return torch.stack([self.numbers(rank, to) for rank in range(self.size)]).sum(0)

    def blanks(self) -> list[Tensor]:
        """Return a tensor per rank for results."""
        return [torch.full((self.length,), -1.0) for _ in range(self.size)]


def _all_reduce(call: Call, rank: int) -> bool:
    tensor = call.numbers(rank)
    dist.all_reduce(tensor)
    return torch.equal(tensor, call.total())


def _small_all_reduce(call: Call, rank: int) -> bool:
    tensor = torch.tensor((1 + call.number) * 2**rank)
    dist.all_reduce(tensor)
    return tensor.item() == (1 + call.number) * (2**call.size - 1)


def _reduce(call: Call, rank: int) -> bool:
    tensor = call.numbers(rank)
    dist.reduce(tensor, call.root)
    return torch.equal(tensor, call.total() if rank == call.root else call.numbers(rank))


def _broadcast(call: Call, rank: int) -> bool:
    tensor = call.numbers(rank)
    dist.broadcast(tensor, call.root)
    return torch.equal(tensor, call.numbers(call.root))


def _all_gather(call: Call, rank: int) -> bool:
    parts = call.blanks()
    dist.all_gather(parts, call.numbers(rank))
    return all(torch.equal(part, call.numbers(r)) for r, part in enumerate(parts))


def _gather(call: Call, rank: int) -> bool:
    parts = call.blanks() if rank == call.root else None
    dist.gather(call.numbers(rank), parts, call.root)
    return all(torch.equal(part, call.numbers(r)) for r, part in enumerate(parts or []))


def _scatter(call: Call, rank: int) -> bool:
    result = call.blanks()[0]
    given = [call.numbers(call.root, to) for to in range(call.size)]
    dist.scatter(result, given if rank == call.root else None, call.root)
    return torch.equal(result, call.numbers(call.root, rank))


def _reduce_scatter(call: Call, rank: int) -> bool:
    result = call.blanks()[0]
    dist.reduce_scatter(result, [call.numbers(rank, to) for to in range(call.size)])
    return torch.equal(result, call.total(rank))


def _all_to_all(call: Call, rank: int) -> bool:
    results = call.blanks()
    dist.all_to_all(results, [call.numbers(rank, to) for to in range(call.size)])
    return all(torch.equal(part, call.numbers(r, rank)) for r, part in enumerate(results))


def _barrier(call: Call, rank: int) -> bool:
    dist.barrier()
    return True


def _unwaited_all_reduces(call: Call, rank: int) -> bool:
    """Two at once, which the process's own thread moves on."""
    tensors = [call.numbers(rank, to) for to in range(2)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return all(torch.equal(tensor, call.total(to)) for to, tensor in enumerate(tensors))


def _messages(call: Call, rank: int) -> bool:
    """To the next rank, from the one before."""
    before, after = (rank - 1) % call.size, (rank + 1) % call.size
    result = call.blanks()[0]
    sending = dist.isend(call.numbers(rank), after, tag=call.number)
    dist.recv(result, before, tag=call.number)
    sending.wait()
    return torch.equal(result, call.numbers(before))


KINDS: dict[str, Callable[[Call, int], bool]] = {
    "all_reduce": _all_reduce,
    "small all_reduce": _small_all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "unwaited all_reduces": _unwaited_all_reduces,
    "messages": _messages,
}
WITH_POINTS = tuple(kind for kind in KINDS if kind != "messages")
"""Those that pass the points of :data:`phalanx.distributed.shared_memory.POINTS`."""

LENGTHS = (1, 5, 4097, 70_001, 300_001)
"""Less than a piece, and more; no multiple of anything."""


def draw(chance: random.Random, number: int, size: int) -> Call:
    """Draw a call; ranks that draw with the same seed draw the same."""
    kind = chance.choice(list(KINDS))
    return Call(kind, number, chance.choice(LENGTHS), size, chance.randrange(size))
