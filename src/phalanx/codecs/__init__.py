"""Gradient codecs: fewer bytes for what replicas and ranks send each other."""

from phalanx.codecs.cast import Cast
from phalanx.codecs.codec import Codec, Payload, payload_bytes
from phalanx.codecs.feedback import Feedback
from phalanx.codecs.naming import resolve_codec
from phalanx.codecs.one_bit import OneBit
from phalanx.codecs.packet import pack, unpack
from phalanx.codecs.top_k import TopK

__all__ = [
    "Cast",
    "Codec",
    "Feedback",
    "OneBit",
    "Payload",
    "TopK",
    "pack",
    "payload_bytes",
    "resolve_codec",
    "unpack",
]
