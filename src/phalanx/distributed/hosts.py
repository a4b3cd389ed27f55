"""Which ranks of a group are on which host: each says where it is, and all decide alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["hosts_of", "this_host"]


def hosts_of(host_ids: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in the order of the hosts' lowest ranks, which lead them.

    Example:
        >>> hosts_of(["a", "b", "a", "a", "b"])
        [[0, 2, 3], [1, 4]]
    """
    ranks_by_id: dict[str, list[int]] = {}
    for rank, host_id in enumerate(host_ids):
        ranks_by_id.setdefault(host_id, []).append(rank)
    return list(ranks_by_id.values())


def this_host() -> str:
    """Return what is equal for processes that can share memory, and for no others.

    They run under one kernel, see each other's process numbers, and belong to one user. The
    variable ``PHALANX_HOST`` tells processes apart that could share memory, so that one machine can
    play several.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot} {processes} {os.geteuid()} {os.environ.get('PHALANX_HOST', '')}"
