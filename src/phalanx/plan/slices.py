"""The number of rows that each part of a batch gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from phalanx.errors import ConfigError
from phalanx.plan.arguments import check_argument


def equal_sizes(total: int, parts: int) -> list[int]:
    """Cut ``total`` rows into ``parts`` sizes that differ by at most one, larger ones first.

    More parts than rows leave the last parts empty.

    Example:
        >>> equal_sizes(10, 4)
        [3, 3, 2, 2]
        >>> equal_sizes(1, 3)
        [1, 0, 0]

    Source: torch/cunn's DataParallelTable (first r replicas get one row more).
    """
    quotient, remainder = divmod(total, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)


def ranges_of(num_microbatches: int, num_ranks: int) -> list[range]:
    """Return which microbatches each rank computes.

    Example:
        >>> ranges_of(4, 3)
        [range(0, 1), range(1, 2), range(2, 4)]
    """
    stops = [num_microbatches * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(stops)]


def workload_sizes(total: int, workloads: Sequence[float]) -> list[int]:
    """Apportion ``total`` rows in proportion to ``workloads`` by largest remainder.

    Each size is within one row of its exact share ``w·total/Σw``; a workload of 0 gets no row;
    equal remainders are served in order, so that equal workloads give :func:`equal_sizes`. They are
    finite, at least 0, and one of them is above it.

    Example:
        >>> workload_sizes(9, [2, 1])
        [6, 3]
        >>> workload_sizes(5, [1, 0, 1])
        [3, 0, 2]

    Source: MXNet's ``work_load_list``, without its rounding (which gave the last device the
    remainder, or refused the batch).
    """
    scale = max(workloads)  # scaled first, so that huge workloads cannot overflow their sum
    scaled = [workload / scale for workload in workloads]
    whole = math.fsum(scaled)
    shares = [total * (workload / whole) for workload in scaled]
    sizes = [math.floor(share) for share in shares]
    left = total - sum(sizes)
    served = [index for index, workload in enumerate(scaled) if workload > 0]
    by_remainder = sorted(served, key=lambda index: (sizes[index] - shares[index], index))
    for index in by_remainder[:left]:
        sizes[index] += 1
    return sizes


# Any, here and below: whatever the user wrote.
def read_workloads(workloads: Any, num_devices: int) -> list[float]:
    """Return a share for each device; None stands for equal ones.

    Raises:
        ConfigError: They are no numbers, or no batch can be cut by them.
    """
    if workloads is None:
        return [1.0] * num_devices
    try:
        shares = [float(share) for share in workloads]
    except (TypeError, ValueError):
        shares = []
    fits = len(shares) == num_devices and all(0 <= share < math.inf for share in shares)
    way_out = f"Give [1] * {num_devices} for equal shares."
    wanted = f"hold one share per device ({num_devices}), finite, at least 0 and not all 0"
    check_argument(fits and any(shares), "workloads", wanted, workloads, way_out)
    return shares


def read_weights(weigh: Any, pieces: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return how much the mean of each piece counts; one of no rows counts nothing.

    Args:
        weigh: Called with each piece that has rows.
        sizes: Rows of each piece.

    Raises:
        ConfigError: A weight is negative or no finite number, or all are 0.

    Example:
        >>> read_weights(len, ["ab", "", "c"], [2, 0, 1])
        [2.0, 0.0, 1.0]
    """
    weights = [
        _read_weight(weigh(piece), index) if size else 0.0
        for index, (piece, size) in enumerate(zip(pieces, sizes, strict=True))
    ]
    if not any(weights):
        raise ConfigError(
            "`weight` must be above 0 for at least one piece of the batch, but is 0 for all. "
            "Leave batches out that count nothing."
        )
    return weights


def _read_weight(given: Any, index: int) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"`weight` must return a finite number of at least 0, but returned {given!r:.80} for "
            f"piece {index} of the batch. Take a sum: lambda targets: (targets >= 0).sum(), say."
        )
    return value
