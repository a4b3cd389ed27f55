"""Where parameters and gradients lie, and what processes share."""

from phalanx.memory.allocator import keep_freed_memory
from phalanx.memory.flat import (
    Allocate,
    FlatParameters,
    Part,
    Range,
    Segment,
    dense_strides,
    in_memory_order,
    zeros,
)
from phalanx.memory.process import ProcessIdentity, die_with_parent
from phalanx.memory.region import Region

__all__ = [
    "Allocate",
    "FlatParameters",
    "Part",
    "ProcessIdentity",
    "Range",
    "Region",
    "Segment",
    "dense_strides",
    "die_with_parent",
    "in_memory_order",
    "keep_freed_memory",
    "zeros",
]
