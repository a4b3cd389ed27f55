"""The c10d backend ``phalanx``: collectives over shared memory, and gloo between hosts.

make_group ──> find_hosts ──> all on one host    SharedGroup over OneHost
                          └─> on several         SharedGroup over SeveralHosts

With NCCL it is a CudaGroup, which gives that the CUDA tensors.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from phalanx.distributed.cuda_group import CudaGroup, nccl_is_here
from phalanx.distributed.group_rendezvous import GroupRendezvous
from phalanx.distributed.hosts import loopback, network_interfaces
from phalanx.distributed.network import Network
from phalanx.distributed.one_host import OneHost
from phalanx.distributed.process_group import NAME, SharedGroup
from phalanx.distributed.several_hosts import SeveralHosts
from phalanx.native import require_library

__all__ = ["NAME", "SharedGroup", "make_group", "open_group"]


def make_group(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> SharedGroup:
    """Make the group of these ranks; what ``torch.distributed`` calls."""
    # A job that is started again may have the store of the attempt before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return open_group(PrefixStore(f"attempt/{attempt}/", store), rank, size, timeout)


def open_group(
    store: Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    look: Callable[[], None] = lambda: None,
) -> SharedGroup:
    """Make the group of these ranks, which meet in ``store`` and nobody else does.

    Args:
        look: Called while another is waited for; raises a `PeerError` where that is in vain.
    """
    require_library("Process groups of phalanx")
    timeout_s = timeout.total_seconds()
    rendezvous = GroupRendezvous(store, rank, size, timeout_s, look)
    hosts = rendezvous.find_hosts()
    here = hosts.ranks[hosts.host_of(rank)]
    interfaces = network_interfaces()
    if len(hosts.ranks) == 1 and not interfaces:
        interfaces = [name for name in [loopback()] if name]
    memory = rendezvous.share_memory(here)
    gloo = rendezvous.connect("all", range(size), interfaces)
    rendezvous.tidy()
    error_store = rendezvous.error_store
    network = Network(gloo, rank, memory.pages, error_store, timeout_s)
    collectives: OneHost | SeveralHosts = OneHost(memory)
    if len(hosts.ranks) > 1:
        collectives = SeveralHosts(memory, network, hosts, rank, error_store)
    kind = CudaGroup if nccl_is_here() else SharedGroup
    return kind(memory, collectives, network, store, timeout_s, make_group)


# Here, and not in a function that somebody would have to call: importing the room is enough.
dist.Backend.register_backend(NAME, make_group, devices=["cpu"])
