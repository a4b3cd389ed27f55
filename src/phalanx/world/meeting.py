"""How the ranks of a new group find each other's memory: through torch.distributed's store.

    rank 0   makes the region ──> store: process, descriptor ──> others map /proc/<pid>/fd/<fd>

The region has no name, so nothing is left behind by whatever crash. Keys hold the attempt (of a job
that is started again) and how often this rank has met under this name: a store may outlive a group.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.clock import now_s
from phalanx.errors import PeerTimeout, UnsupportedError
from phalanx.memory import Region
from phalanx.world.arena import Arena
from phalanx.world.bell import Bell, Bells
from phalanx.world.board import Board

__all__ = ["meet"]


def meet(store: Store, rank: int, size: int, timeout_s: float) -> Arena:
    """Return the memory that ``size`` ranks share, once all have come.

    Raises:
        UnsupportedError: Not all ranks are processes of one host, one user and one container.
        PeerTimeout: A rank did not come in ``timeout_s`` seconds.

    Collective: All ranks of the group. Blocks: Until all have come.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    times = store.add(f"phalanx/{attempt}/{rank}", 1)
    ours = PrefixStore(f"phalanx/{attempt}/{times}/", store)
    deadline_s = now_s() + timeout_s
    bell = Bell()
    region = Region.create(Arena.needed_bytes(size), label="group") if rank == 0 else None
    me: dict[str, Any] = {"where": _where(), "pid": os.getpid(), "bell": bell.fd}
    if region is not None:
        me["fd"] = region.fd
    ours.set(str(rank), json.dumps(me))
    cards = [_card(ours, other, size, deadline_s, timeout_s) for other in range(size)]
    for other, card in enumerate(cards):
        if card["where"] != cards[0]["where"]:
            raise UnsupportedError(
                f"All ranks of a `phalanx` group must be processes of one host and user, but rank "
                f'{other} is elsewhere than rank 0. Use `backend="gloo"` across hosts.'
            )
    if region is None:
        label = "group"
        region = Region.borrow(
            cards[0]["pid"], cards[0]["fd"], Arena.needed_bytes(size), label=label
        )
    board = Board(region, rank, size)
    bells = Bells(board, bell)
    for other in board.others:
        bells.reach(other, cards[other]["pid"], cards[other]["bell"])
    arena = Arena(region, board, bells)
    _wait_for_all(ours, rank, size, deadline_s, timeout_s)
    _tidy(ours, size)
    return arena


def _where() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.geteuid()}"


def _card(
    store: Store, rank: int, size: int, deadline_s: float, timeout_s: float
) -> dict[str, Any]:
    return dict(json.loads(_get(store, str(rank), rank, size, deadline_s, timeout_s)))


def _get(
    store: Store, key: str, rank: int, size: int, deadline_s: float, timeout_s: float
) -> bytes:
    try:
        store.wait([key], timedelta(seconds=max(0.01, deadline_s - now_s())))
    except RuntimeError as exc:
        raise PeerTimeout(
            f"Rank {rank} of {size} did not come to make the group within {timeout_s:g} s.", rank
        ) from exc
    return bytes(store.get(key))


def _wait_for_all(store: Store, rank: int, size: int, deadline_s: float, timeout_s: float) -> None:
    """Wait until all have mapped the region, so that rank 0 may go as soon as it likes."""
    store.set(f"mapped/{rank}", "1")
    for other in range(size):
        _get(store, f"mapped/{other}", other, size, deadline_s, timeout_s)


def _tidy(store: Store, size: int) -> None:
    """Take out of the store what all have read, else it grows with each group; the last does it."""
    if store.add("read", 1) == size:
        for rank in range(size):
            store.delete_key(str(rank))
            store.delete_key(f"mapped/{rank}")
        store.delete_key("read")
