"""The c10d backend ``phalanx``: collectives over shared memory, and gloo between hosts.

make_group ──> who is where? ──> all on one host      SharedGroup, ways within memory
                             └─> on several           AcrossGroup, ways across them
                                 (hosts with NCCL     their Cuda kinds: CUDA tensors go there)
"""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.distributed.across import Across
from phalanx.distributed.across_group import AcrossGroup
from phalanx.distributed.cuda_group import CudaAcrossGroup, CudaGroup, nccl_is_here
from phalanx.distributed.group import NAME, SharedGroup
from phalanx.distributed.hosts import network_interfaces
from phalanx.distributed.meeting import Meeting
from phalanx.distributed.within import Within

__all__ = ["NAME", "SharedGroup", "make_group"]


def make_group(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> SharedGroup:
    """Make the group of these ranks; what ``torch.distributed`` calls."""
    timeout_s = timeout.total_seconds()
    meeting = Meeting(store, rank, size, timeout_s)
    hosts = meeting.find_hosts()
    cuda = nccl_is_here()
    arena = meeting.share_memory(hosts.ranks[hosts.host_of(rank)])
    if len(hosts.ranks) == 1:
        shared = CudaGroup if cuda else SharedGroup
        return shared(arena, Within(arena), store, timeout_s, make_group)
    across = Across(arena, hosts, rank, meeting.store, timeout_s, network_interfaces())
    return (CudaAcrossGroup if cuda else AcrossGroup)(arena, across, store, timeout_s, make_group)


# Here, and not in a function that somebody would have to call: `import phalanx` is enough.
dist.Backend.register_backend(NAME, make_group, devices=["cpu"])
