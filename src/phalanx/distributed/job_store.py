"""The store of a job, and the hosts of its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, rendezvous

from phalanx.environment import Place
from phalanx.errors import PeerTimeout

__all__ = ["open_store", "ranks_by_host", "this_host"]


def open_store(place: Place, timeout_s: float) -> Store:
    """Return the store of the job, as `init_process_group()` would find it.

    Rank 0 makes it, where torchrun's agent has not; `init_process_group()` of the same process uses
    the same one.

    Raises:
        ConfigError: The launcher has not said where it is.
        PeerTimeout: It is not there in time.
    """
    address, port = place.find_store()
    timeout = timedelta(seconds=timeout_s)
    try:
        found = rendezvous(f"tcp://{address}:{port}", place.rank, place.size, timeout=timeout)
        store: Store = next(found)[0]
    except RuntimeError as exc:
        raise PeerTimeout(
            f"The store of the job at {address}:{port} was not there within {timeout_s:g} s: "
            f"{exc}. See that rank 0 runs, and that its host lets this one connect.",
            0,
        ) from exc
    store.set_timeout(timeout)
    return store


def ranks_by_host(host_ids: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in the order of the hosts' lowest ranks, which lead them.

    Example:
        >>> ranks_by_host(["a", "b", "a", "a", "b"])
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
