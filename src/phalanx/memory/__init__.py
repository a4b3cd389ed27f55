"""Where parameters and gradients lie, and what processes share."""

from phalanx.memory.allocator import give_back_freed_memory, keep_freed_memory
from phalanx.memory.awake import keep_awake, tie_to_core
from phalanx.memory.barrier import KEEPS_ORDER, SharedBarrier, fence
from phalanx.memory.blocks import (
    PAST_CACHE_BYTES,
    all_finite,
    copy_to,
    has_memory,
    sum_to,
)
from phalanx.memory.compiled import Function, compiled_for, compiled_function, is_compiled
from phalanx.memory.faults import Fault, plant, planted, reach
from phalanx.memory.flat import (
    ALIGN_BYTES,
    Allocate,
    FlatParameters,
    Part,
    Range,
    Segment,
    dense_strides,
    in_memory_order,
    zeros,
)
from phalanx.memory.forks import forget_in_child
from phalanx.memory.locks import LockFile, RangeLock
from phalanx.memory.placement import Field, Placement
from phalanx.memory.process import ProcessIdentity, die_with_parent, signal_main_thread
from phalanx.memory.region import Region
from phalanx.memory.room import available_memory_bytes
from phalanx.memory.rows import MatrixRows, all_within, clamp_rows
from phalanx.memory.run_directory import RunDirectory
from phalanx.memory.shared_memory_pool import SharedMemoryPool, TensorHandle
from phalanx.memory.waiting import Waiting

__all__ = [
    "ALIGN_BYTES",
    "KEEPS_ORDER",
    "PAST_CACHE_BYTES",
    "Allocate",
    "Fault",
    "Field",
    "FlatParameters",
    "Function",
    "LockFile",
    "MatrixRows",
    "Part",
    "Placement",
    "ProcessIdentity",
    "Range",
    "RangeLock",
    "Region",
    "RunDirectory",
    "Segment",
    "SharedBarrier",
    "SharedMemoryPool",
    "TensorHandle",
    "Waiting",
    "all_finite",
    "all_within",
    "available_memory_bytes",
    "clamp_rows",
    "compiled_for",
    "compiled_function",
    "copy_to",
    "dense_strides",
    "die_with_parent",
    "fence",
    "forget_in_child",
    "give_back_freed_memory",
    "has_memory",
    "in_memory_order",
    "is_compiled",
    "keep_awake",
    "keep_freed_memory",
    "plant",
    "planted",
    "reach",
    "signal_main_thread",
    "sum_to",
    "tie_to_core",
    "zeros",
]
