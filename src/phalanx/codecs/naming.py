"""Codecs by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from phalanx.codecs.cast import Cast
from phalanx.codecs.codec import Codec
from phalanx.codecs.one_bit import OneBit
from phalanx.codecs.top_k import TopK
from phalanx.errors import ConfigError

__all__ = ["resolve_codec"]

_CODEC_BY_NAME: dict[str, Callable[[], Codec]] = {
    "fp16": lambda: Cast(torch.float16),
    "bf16": lambda: Cast(torch.bfloat16),
    "one_bit": OneBit,
    "top_k": TopK,
}
_TOP_K = re.compile(r"top_k\(\s*([0-9.eE+-]+)\s*\)")


def resolve_codec(codec: Codec | str) -> Codec:
    """Return ``codec``, made from its name where it is one.

    Example:
        >>> resolve_codec("top_k(0.05)")
        TopK(fraction=0.05)
        >>> resolve_codec(OneBit(min_elements=100))
        OneBit(min_elements=100)

    Raises:
        ConfigError: There is no codec of that name, or its fraction is out of range.
    """
    if isinstance(codec, Codec):
        return codec
    if isinstance(codec, str):
        if codec in _CODEC_BY_NAME:
            return _CODEC_BY_NAME[codec]()
        match = _TOP_K.fullmatch(codec)
        if match and (fraction := _number(match[1])) is not None:
            return TopK(fraction)
    raise ConfigError(
        "`codec` must be 'fp16', 'bf16', 'one_bit', 'top_k', 'top_k(fraction)' or a `Codec`, "
        f"but is {codec!r}."
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
