"""The collectives of a group whose ranks are all on one host: each is one call in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.distributed.shared_memory import SharedMemory
from phalanx.distributed.work import Steps

__all__ = ["OneHost"]


class OneHost:
    """The collectives over ``memory``; tensors are flat, and bytes where they only move.

    ``what`` and ``count`` of an operation are equal on all ranks: see `fingerprint.pack`.

    Attributes:
        rank: Ours.
        size: How many ranks there are.
        num_hosts: On how many hosts they are.
        takes_halves: Whether numbers of 16 bits may be added up as they are.
    """

    num_hosts = 1
    takes_halves = True

    def __init__(self, memory: SharedMemory) -> None:
        self.rank, self.size = memory.rank, memory.size
        self._memory = memory

    def agree(self, what: int, count: int) -> Steps:
        """Wait until all ranks have come to the same operation."""
        yield self._memory.agree(what, count)

    def all_reduce(self, flat: Tensor, what: int, count: int) -> Steps:
        """Add up ``flat`` over the ranks, in place; all get bitwise identical sums."""
        yield self._memory.all_reduce(flat, what, count)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], what: int, count: int
    ) -> Steps:
        """Add up over the ranks what each holds for this one, into ``output``."""
        yield self._memory.reduce_scatter(output, inputs, what, count)

    def broadcast(self, data: Tensor, root: int, what: int, count: int) -> Steps:
        """Give every rank the bytes of ``root``."""
        yield self._memory.broadcast(data, root, what, count)

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor, what: int, count: int) -> Steps:
        """Give every rank the bytes of all, which may differ in length."""
        yield self._memory.all_gather(outputs, given, what, count)

    def swap(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], what: int, count: int
    ) -> Steps:
        """Give each rank other bytes; lengths may all differ."""
        yield self._memory.swap(outputs, inputs, what, count)

    def report(self, error: BaseException) -> None:
        """Do nothing: the ranks of one host read errors from the shared status pages."""
