"""How ranks talk to each other."""

from phalanx.world.codec_hook import CodecHook, codec_hook
from phalanx.world.merge_hook import Hook, merge_hook

__all__ = ["CodecHook", "Hook", "codec_hook", "merge_hook"]
