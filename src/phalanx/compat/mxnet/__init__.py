"""MXNet's executor group, its batches, monitor and metrics."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.compat.mxnet.batches import DataBatch, DataDesc
from phalanx.compat.mxnet.eval_metrics import Accuracy, CustomMetric, EvalMetric
from phalanx.compat.mxnet.group import DataParallelExecutorGroup
from phalanx.compat.mxnet.monitor import Monitor
from phalanx.plan import workload_sizes

__all__ = [
    "Accuracy",
    "CustomMetric",
    "DataBatch",
    "DataDesc",
    "DataParallelExecutorGroup",
    "EvalMetric",
    "Monitor",
    "_split_input_slice",
]


def _split_input_slice(batch_size: int, work_load_list: Sequence[float]) -> list[slice]:
    """Return each device's rows; unlike MXNet's, no case is refused, and none gets the remainder.

    Example:
        >>> _split_input_slice(6, [1, 1, 1, 1])
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 6, None)]

    Raises:
        ConfigError: A workload is negative or not finite, or all are zero.
    """
    sizes = workload_sizes(batch_size, work_load_list)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
