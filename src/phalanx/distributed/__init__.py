"""How ranks talk to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.distributed.backend import SharedGroup, make_group
from phalanx.distributed.codec_hook import CodecHook, codec_hook
from phalanx.distributed.cuda_group import nccl_is_here
from phalanx.distributed.elastic_exchange import ElasticExchange, GroupChanged, RanksChanged
from phalanx.distributed.exchange import Exchange, ProcessGroup
from phalanx.distributed.hosts import hosts_of, interfaces_up, network_interfaces, this_host
from phalanx.distributed.merge_hook import Hook, merge_hook
from phalanx.distributed.open_store import keep_store, open_store

if TYPE_CHECKING:
    from phalanx.distributed.launcher import (
        Job,
        RankFailed,
        available_cores,
        describe_failures,
        launch,
        launch_script,
        process_failure,
        signals_put_back,
    )
    from phalanx.distributed.rank_start import run_script

__all__ = [
    "CodecHook",
    "ElasticExchange",
    "Exchange",
    "GroupChanged",
    "Hook",
    "Job",
    "ProcessGroup",
    "RankFailed",
    "RanksChanged",
    "SharedGroup",
    "available_cores",
    "codec_hook",
    "describe_failures",
    "hosts_of",
    "interfaces_up",
    "keep_store",
    "launch",
    "launch_script",
    "make_group",
    "merge_hook",
    "nccl_is_here",
    "network_interfaces",
    "open_store",
    "process_failure",
    "run_script",
    "signals_put_back",
    "this_host",
]

_OF_THE_LAUNCHER = {
    *("Job", "RankFailed", "available_cores"),
    *("describe_failures", "process_failure", "signals_put_back"),
    *("launch", "launch_script", "run_script"),
}


def __getattr__(name: str) -> object:
    """Import the launcher when it is used: torch's, below it, takes a quarter of a second."""
    if name not in _OF_THE_LAUNCHER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phalanx.distributed import launcher, rank_start  # late: see above

    return getattr(rank_start if name == "run_script" else launcher, name)
