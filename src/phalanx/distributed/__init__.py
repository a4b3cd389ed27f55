"""Communication between ranks."""

from __future__ import annotations

from phalanx.distributed.codec_hook import codec_hook
from phalanx.distributed.elastic_exchange import ElasticExchange, GroupChanged
from phalanx.distributed.elastic_membership import RunEnded
from phalanx.distributed.exchange import Exchange, ProcessGroup, nccl_is_here, num_default_ranks
from phalanx.distributed.group_rendezvous import SharedGroup, make_group
from phalanx.distributed.job_store import open_store, ranks_by_host, this_host

__all__ = [
    "ElasticExchange",
    "Exchange",
    "GroupChanged",
    "ProcessGroup",
    "RunEnded",
    "SharedGroup",
    "codec_hook",
    "make_group",
    "nccl_is_here",
    "num_default_ranks",
    "open_store",
    "ranks_by_host",
    "this_host",
]
