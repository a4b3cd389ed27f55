"""The collectives of a group whose ranks are all on one host: in its memory alone."""

from __future__ import annotations

from functools import partial

from phalanx.distributed import collectives
from phalanx.distributed.collective_buffers import CollectiveBuffers

__all__ = ["IntraHost"]


class IntraHost:
    """The collectives over ``buffers``.

    Attributes:
        rank: Ours, in the group.
        size: How many ranks it has.
        grace_s: How much longer than asked this rank waits for those of its host.
        num_hosts: Of the group.
    """

    grace_s = 0.0
    num_hosts = 1

    def __init__(self, buffers: CollectiveBuffers) -> None:
        self.rank = buffers.rank
        self.size = buffers.size
        self.all_reduce = partial(collectives.all_reduce, buffers)
        self.reduce = partial(collectives.reduce, buffers)
        self.reduce_scatter = partial(collectives.reduce_scatter, buffers)
        self.broadcast = partial(collectives.broadcast, buffers)
        self.all_gather = partial(collectives.all_gather, buffers)
        self.gather = partial(collectives.gather, buffers)
        self.scatter = partial(collectives.scatter, buffers)
        self.all_to_all = partial(collectives.all_to_all, buffers)
        self.barrier = partial(collectives.barrier, buffers)

    def report(self, error: BaseException) -> None:
        """Do nothing: the ranks of one host read errors from the shared status pages."""

    def close(self) -> None:
        """Do nothing: the memory is the group's."""
