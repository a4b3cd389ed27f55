"""The c10d backend ``phalanx``: collectives over shared memory, and gloo between hosts.

make_group ──> find_hosts ──> all on one host    SharedGroup over IntraHost and PointToPoint
                          └─> on several         SharedGroup over Hierarchical and a Transport

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
from phalanx.distributed.hierarchical import Hierarchical
from phalanx.distributed.hosts import network_interfaces
from phalanx.distributed.intra_host import IntraHost
from phalanx.distributed.point_to_point import PointToPoint
from phalanx.distributed.process_group import NAME, SharedGroup
from phalanx.distributed.transport import Transport

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
    timeout_s = timeout.total_seconds()
    rendezvous = GroupRendezvous(store, rank, size, timeout_s, look)
    hosts = rendezvous.find_hosts()
    buffers = rendezvous.share_memory(hosts.ranks[hosts.host_of(rank)])
    collectives: IntraHost | Hierarchical
    messages: PointToPoint | Transport
    if len(hosts.ranks) == 1:
        collectives, messages = IntraHost(buffers), PointToPoint(buffers.pages)
    else:
        collectives = Hierarchical(
            buffers, hosts, rank, rendezvous.store, timeout_s, network_interfaces()
        )
        messages = collectives.messages
    kind = CudaGroup if nccl_is_here() else SharedGroup
    return kind(buffers, collectives, messages, store, timeout_s, make_group)


# Here, and not in a function that somebody would have to call: importing the room is enough.
dist.Backend.register_backend(NAME, make_group, devices=["cpu"])
