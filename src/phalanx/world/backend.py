"""The c10d backend ``phalanx``: collectives over shared memory for ranks of one host."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.world.group import NAME, SharedGroup
from phalanx.world.meeting import meet

__all__ = ["NAME", "SharedGroup", "make_group"]


def make_group(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> SharedGroup:
    """Make the group of these ranks; what ``torch.distributed`` calls."""
    timeout_s = timeout.total_seconds()
    return SharedGroup(meet(store, rank, size, timeout_s), store, timeout_s, make_group)


# Here, and not in a function that somebody would have to call: `import phalanx` is enough.
dist.Backend.register_backend(NAME, make_group, devices=["cpu"])
