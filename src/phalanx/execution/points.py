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
)
"""All points, in the order of a step. Inside forward and backward it is the module that stops."""
