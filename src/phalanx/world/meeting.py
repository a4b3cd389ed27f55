"""How the ranks of a new group find each other's memory: through torch.distributed's store.

    all      say where they are ──> store ──> all: who is on my host?
    on each host, the first makes the region ──> store: process, descriptor ──> the others of the
                                                 host map /proc/<pid>/fd/<fd>

The region has no name, so nothing is left behind by whatever crash. Keys hold the attempt (of a job
that is started again) and how often this rank has met under this name: a store may outlive a group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.clock import now_s
from phalanx.errors import PeerTimeout
from phalanx.memory import Region
from phalanx.world.arena import Arena
from phalanx.world.bell import Bell, Bells
from phalanx.world.board import Board
from phalanx.world.hosts import Hosts, hosts_of, this_place

__all__ = ["Meeting"]


class Meeting:
    """The making of one group of ``size`` ranks; all ranks do the same in the same order.

    Args:
        store: Where they meet.
        rank: Who we are.
        size: How many come.
        timeout_s: How long all of it may take.

    Attributes:
        store: A part of the store that no other meeting uses.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        times = store.add(f"phalanx/{attempt}/{rank}", 1)
        self.store: Store = PrefixStore(f"phalanx/{attempt}/{times}/", store)
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._deadline_s = now_s() + timeout_s

    def find_hosts(self) -> Hosts:
        """Return who is on which host.

        Raises:
            PeerTimeout: A rank did not come.

        Blocks: Until all have come.
        """
        self.store.set(f"place/{self.rank}", this_place())
        return hosts_of([self._get(f"place/{r}", r).decode() for r in range(self.size)])

    def share_memory(self, ranks: Sequence[int]) -> Arena:
        """Return the memory that ``ranks``, which are on this host, share.

        Raises:
            PeerTimeout: One of them did not come.

        Blocks: Until all of them have come.
        """
        first = ranks[0]
        bell = Bell()
        needed_bytes = Arena.needed_bytes(len(ranks))
        region = Region.create(needed_bytes, label="group") if self.rank == first else None
        me: dict[str, Any] = {"pid": os.getpid(), "bell": bell.fd}
        if region is not None:
            me["fd"] = region.fd
        self.store.set(str(self.rank), json.dumps(me))
        cards = [dict(json.loads(self._get(str(rank), rank))) for rank in ranks]
        if region is None:
            region = Region.borrow(cards[0]["pid"], cards[0]["fd"], needed_bytes, label="group")
        board = Board(region, ranks.index(self.rank), ranks, self.size)
        bells = Bells(board, bell)
        for other in board.others:
            bells.reach(other, cards[other]["pid"], cards[other]["bell"])
        arena = Arena(region, board, bells)
        # All have mapped the region, so that the first may go as soon as it likes.
        self.store.set(f"mapped/{self.rank}", "1")
        for rank in ranks:
            self._get(f"mapped/{rank}", rank)
        self._tidy()
        return arena

    def _tidy(self) -> None:
        """Take out of the store what all have read, so that it does not grow with each group."""
        if self.store.add("read", 1) == self.size:
            for rank in range(self.size):
                for key in (f"place/{rank}", str(rank), f"mapped/{rank}"):
                    self.store.delete_key(key)
            self.store.delete_key("read")

    def _get(self, key: str, rank: int) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=max(0.01, self._deadline_s - now_s())))
        except RuntimeError as exc:
            raise PeerTimeout(
                f"Rank {rank} of {self.size} did not come to make the group within "
                f"{self._timeout_s:g} s.",
                rank,
            ) from exc
        return bytes(self.store.get(key))
