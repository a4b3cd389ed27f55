"""One step, many times over: how long workers compute that share cores and are not alike.

S: simulated steps.  M: microbatches of a step.  W: workers of a host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "makespan_s", "work_of_workers_s"]

Floats = NDArray[np.float64]


def makespan_s(work_SW: Floats, cores: int) -> Floats:
    """Return when the last worker of a host is done, by simulated step.

    Workers that are more than the cores share them evenly, as the kernel's scheduler does; a worker
    that is done leaves its share to the others. So with the work in rising order, x1, x2, …, the
    stretch from the end of worker j - 1 to that of worker j lasts
    (xj - x(j-1)) · max(1, workers left / cores).

    Shapes:
        work_SW: seconds that each worker would take alone -> [S].

    Example:
        >>> makespan_s(np.array([[3.0, 1.0]]), cores=2), makespan_s(np.array([[3.0, 1.0]]), cores=1)
        (array([3.]), array([4.]))
    """
    workers = work_SW.shape[1]
    if workers <= cores:
        return np.asarray(work_SW.max(axis=1))
    stretches = np.diff(np.sort(work_SW, axis=1), axis=1, prepend=0.0)
    left = np.arange(workers, 0, -1)
    return np.asarray(stretches @ np.maximum(1.0, left / cores))


def work_of_workers_s(seconds_SM: Floats, shares: Sequence[int], *, has_queue: bool) -> Floats:
    """Return how long each worker computes: the microbatches that it has taken.

    Args:
        seconds_SM: What each microbatch takes.
        shares: Microbatches by worker, 1 at least, if they are dealt out beforehand.
        has_queue: Whether, instead, whoever is free first takes the next.

    Shapes:
        seconds_SM -> [S, len(shares)].

    Example:
        >>> seconds = np.array([[4.0, 1.0, 1.0, 1.0]])
        >>> work_of_workers_s(seconds, [2, 2], has_queue=False)
        array([[5., 2.]])
        >>> work_of_workers_s(seconds, [2, 2], has_queue=True)
        array([[4., 3.]])
    """
    if not has_queue or len(shares) == seconds_SM.shape[1]:
        starts = np.cumsum([0, *shares[:-1]])
        return np.asarray(np.add.reduceat(seconds_SM, starts, axis=1))
    done_SW = np.zeros((len(seconds_SM), len(shares)))
    steps = np.arange(len(seconds_SM))
    for each_S in seconds_SM.T:
        done_SW[steps, done_SW.argmin(axis=1)] += each_S
    return done_SW
