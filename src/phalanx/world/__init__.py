"""How ranks talk to each other."""

from phalanx.world.backend import SharedGroup, make_group
from phalanx.world.codec_hook import CodecHook, codec_hook
from phalanx.world.exchange import Exchange, num_ranks_here
from phalanx.world.launch import Job, RankFailed, available_cores, launch, launch_script
from phalanx.world.merge_hook import Hook, merge_hook

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
