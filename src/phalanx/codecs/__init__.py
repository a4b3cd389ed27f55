"""Gradient compression for DDP's hook, `phalanx.distributed.codec_hook`."""

from phalanx.codecs.codec import Codec, Payload
from phalanx.codecs.lossy import Feedback, OneBit, TopK
