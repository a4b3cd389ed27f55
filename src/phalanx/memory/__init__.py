"""Where parameters and gradients lie."""

from phalanx.memory.allocator import keep_freed_memory
from phalanx.memory.flat import FlatParameters, Part, Range, Segment, dense_strides, in_memory_order

__all__ = [
    "FlatParameters",
    "Part",
    "Range",
    "Segment",
    "dense_strides",
    "in_memory_order",
    "keep_freed_memory",
]
