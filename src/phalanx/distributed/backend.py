"""The c10d backend ``phalanx``: collectives over shared memory, and gloo between hosts.

make_group ──> find_hosts ──> all on one host    SharedGroup over SharedMemory
                          └─> on several         SharedGroup over SeveralHosts

With NCCL it is a CudaGroup, which gives that the CUDA tensors.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from phalanx.distributed.cuda_group import CudaGroup, nccl_is_here
from phalanx.distributed.group_rendezvous import GroupRendezvous
from phalanx.distributed.network import ErrorStore, Network
from phalanx.distributed.process_group import NAME, SharedGroup
from phalanx.distributed.several_hosts import SeveralHosts
from phalanx.distributed.shared_memory import SharedMemory
from phalanx.environment import read_attempt
from phalanx.native import require_library

__all__ = ["NAME", "SharedGroup", "make_group", "open_group"]


def make_group(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> SharedGroup:
    """Make the group of these ranks; what ``torch.distributed`` calls."""
    # A job that is started again may have the store of the attempt before.
    return open_group(PrefixStore(f"attempt/{read_attempt()}/", store), rank, size, timeout)


def open_group(
    store: Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    look: Callable[[], None] = lambda: None,
) -> SharedGroup:
    """Make the group of these ranks, which alone meet in ``store``.

    Args:
        look: Called while another is waited for; raises a `PeerError` where that is in vain.
    """
    require_library("Process groups of phalanx")
    timeout_s = timeout.total_seconds()
    rendezvous = GroupRendezvous(store, rank, size, timeout_s, look)
    memory = rendezvous.share_memory()
    # Not the rendezvous' own: a rank that still connects is not to read an error of an operation.
    error_store = ErrorStore(PrefixStore("made/", rendezvous.store), rank, size)

    def connect(name: str, ranks: Sequence[int]) -> Network:
        gloo = rendezvous.connect(name, ranks)
        return Network(gloo, ranks, memory.pages, error_store, timeout_s)

    network = connect("all", range(size))
    networks = [network]
    collectives: SharedMemory | SeveralHosts = memory
    if len(rendezvous.hosts) > 1:
        firsts = [ranks[0] for ranks in rendezvous.hosts]
        leaders = connect("leaders", firsts) if rank in firsts else None
        networks += [leaders] if leaders else []
        collectives = SeveralHosts(memory, network, leaders, rendezvous.hosts)
    kind = CudaGroup if nccl_is_here() else SharedGroup
    return kind(memory, collectives, networks, store, timeout_s)


# Here, and not in a function that somebody would have to call: importing the room is enough.
dist.Backend.register_backend(NAME, make_group, devices=["cpu"])
