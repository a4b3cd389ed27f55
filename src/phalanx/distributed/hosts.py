"""Which ranks of a group are on which host: each says where it is, and all decide alike.

where they are   a  b  a  a  b          hosts   (0, 2, 3)  (1, 4)
ranks            0  1  2  3  4          leaders  0          1
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Hosts", "hosts_of", "this_host"]


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group, in the order of their lowest ranks.

    Attributes:
        ranks: The ranks of each host, ascending; the first leads it.
    """

    ranks: tuple[tuple[int, ...], ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each host."""
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def size(self) -> int:
        """How many ranks there are in all."""
        return sum(map(len, self.ranks))

    def host_of(self, rank: int) -> int:
        """Return the host of ``rank``."""
        return next(host for host, ranks in enumerate(self.ranks) if rank in ranks)


def hosts_of(host_ids: Sequence[str]) -> Hosts:
    """Put ranks on one host together.

    Example:
        >>> hosts_of(["a", "b", "a", "a", "b"]).ranks
        ((0, 2, 3), (1, 4))
    """
    ranks_by_id: dict[str, list[int]] = {}
    for rank, host_id in enumerate(host_ids):
        ranks_by_id.setdefault(host_id, []).append(rank)
    return Hosts(tuple(map(tuple, ranks_by_id.values())))


def this_host() -> str:
    """Return what is equal for processes that can share memory, and for no others.

    They run under one kernel, see each other's process numbers, and belong to one user. The
    variable ``PHALANX_HOST`` tells processes apart that could share memory, so that one machine can
    play several.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot} {processes} {os.geteuid()} {os.environ.get('PHALANX_HOST', '')}"
