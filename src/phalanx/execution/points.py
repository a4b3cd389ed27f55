"""Where the chaos tests stop a worker process (:func:`phalanx.ipc.fail_point`)."""

__all__ = ["POINTS"]

POINTS = (
    "born",  # it has all it needs, and has not said so yet
    "microbatch taken",
    "before forward",
    "after backward",
    "gradients half written",
    "gradients written",
    "before reply",
    "shard taken",
    "block saved",  # the undo record of a block of the optimizer's step is complete
    "block stepped",  # the block is new, and does not count as done yet
    "block done",
    "shard done",
)
"""All points, in the order of a step. Inside forward and backward it is the module that stops."""
