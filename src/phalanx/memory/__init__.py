"""The memory of parameters and gradients, and its arithmetic."""

from phalanx.memory.blocks import (
    all_finite,
    all_within,
    copy_to,
    dense_strides,
    has_memory,
    is_expanded,
    laid_out_as,
    refuse_overlap,
)
from phalanx.memory.shared_memory_pool import (
    SharedMemoryPool,
    forget_memory,
    is_shared,
    return_freed_memory,
)
