"""How a group does its operations where all ranks are on one host: in its memory alone."""

from __future__ import annotations

from functools import partial

from phalanx.distributed import collectives
from phalanx.distributed.arena import Arena

__all__ = ["IntraHost"]


class IntraHost:
    """The operations over ``arena``.

    Attributes:
        rank: Who we are in the group.
        size: How many ranks it has.
        patience_s: How much longer than asked this rank waits.
    """

    patience_s = 0.0

    def __init__(self, arena: Arena) -> None:
        self.rank = arena.rank
        self.size = arena.size
        self.all_reduce = partial(collectives.all_reduce, arena)
        self.reduce = partial(collectives.reduce, arena)
        self.reduce_scatter = partial(collectives.reduce_scatter, arena)
        self.broadcast = partial(collectives.broadcast, arena)
        self.all_gather = partial(collectives.all_gather, arena)
        self.gather = partial(collectives.gather, arena)
        self.scatter = partial(collectives.scatter, arena)
        self.all_to_all = partial(collectives.all_to_all, arena)
        self.barrier = partial(collectives.barrier, arena)

    def tell(self, error: BaseException) -> None:
        """Do nothing: all who must hear of an error read the same pages."""

    def close(self) -> None:
        """Do nothing: the memory is the group's."""
