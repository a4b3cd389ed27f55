"""How ranks talk to each other."""

from phalanx.distributed.backend import SharedGroup, make_group
from phalanx.distributed.codec_hook import CodecHook, codec_hook
from phalanx.distributed.exchange import Exchange, num_ranks_here
from phalanx.distributed.launch import Job, RankFailed, available_cores, launch, launch_script
from phalanx.distributed.merge_hook import Hook, merge_hook

__all__ = [
    "CodecHook",
    "Exchange",
    "Hook",
    "Job",
    "RankFailed",
    "SharedGroup",
    "available_cores",
    "codec_hook",
    "launch",
    "launch_script",
    "make_group",
    "merge_hook",
    "num_ranks_here",
]
