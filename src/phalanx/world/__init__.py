"""How ranks talk to each other."""

from phalanx.world.codec_hook import CodecHook, codec_hook
from phalanx.world.exchange import Exchange, num_ranks_here
from phalanx.world.merge_hook import Hook, merge_hook

__all__ = ["CodecHook", "Exchange", "Hook", "codec_hook", "merge_hook", "num_ranks_here"]
