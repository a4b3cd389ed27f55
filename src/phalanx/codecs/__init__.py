"""Gradient compression for DDP's hook, `phalanx.distributed.codec_hook`."""

from phalanx.codecs.codec import Cast, Codec, Payload
from phalanx.codecs.feedback import Feedback, resolve_codec
from phalanx.codecs.lossy import OneBit, TopK
