"""Workloads from measured seconds: a slow device gets fewer rows; and the device of a new module.

A deviation is logarithmic: the time that a device's slice takes at its share, against the others in
the same step. What makes all of them slower, such as other work on the machine, is no deviation. At
the right workloads all deviations are 0.

    rows, seconds ── seconds per row ── deviation ── median of 7 steps ── gain ≥ 5 %? ── move 90 %
                     by device           from the mean of the step                        of it
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from phalanx.errors import ConfigError
from phalanx.plan.slices import check_workloads, workload_sizes

__all__ = ["Balancer", "least_loaded"]

D = TypeVar("D")

_WINDOW = 7  # steps whose median counts: three late ones in a row move nothing
_DAMPING = 0.9  # the part of a deviation that one move takes away
_LEAST_GAIN = 0.05  # the part of a step's time that a move must save
_ONE_ROW = 1.01  # a hair more, which rounding cannot take away


class Balancer:
    """Workloads that follow measured speeds, and rest where less than 5 % is to be gained.

    Every device keeps a row where there are enough, so that it is measured; give workloads with a 0
    for a device that is too slow for that.

    Args:
        num_devices: How many share the work.
        workloads: Where to begin; equal by default.

    Raises:
        ConfigError: Workloads do not fit the devices, or are not all above 0.

    Determinism: the same measurements give the same workloads; no clock is read here.

    Example:
        >>> balancer = Balancer(2)
        >>> for _ in range(15):  # the second device takes three times as long for a row
        ...     rows = workload_sizes(100, balancer.workloads)
        ...     _ = balancer.observe(rows, [0.01 * rows[0], 0.03 * rows[1]])
        >>> workload_sizes(100, balancer.workloads)
        [75, 25]
    """

    def __init__(self, num_devices: int, *, workloads: Sequence[float] | None = None) -> None:
        shares = [1.0] * num_devices if workloads is None else workloads
        check_workloads(shares, num_devices)
        if not all(shares):
            raise ConfigError(
                f"`workloads` must be above 0 to be balanced, but are {list(shares)!r}. Leave "
                "devices out that shall not work."
            )
        self._num_devices = num_devices
        self._workloads = _normalised([math.log(share) for share in shares])
        self._deviations: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(num_devices)]

    @property
    def workloads(self) -> tuple[float, ...]:
        """The shares for the next step; they add up to 1."""
        return self._workloads

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self._workloads)
        return f"Balancer({shares})"

    def observe(self, rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
        """Take in the measurements of one step, and return the workloads for the next one.

        Args:
            rows: Of each device's slice.
            seconds: That each device took for it, without waiting for others or merging; 0 where it
                did nothing or too little to be measured.
        """
        costs = [_cost(count, time_s) for count, time_s in zip(rows, seconds, strict=True)]
        self._note(costs)
        self._move(sum(rows))
        return self._workloads

    def _note(self, costs: Sequence[float | None]) -> None:
        """Keep the step's deviations."""
        times = {
            device: math.log(cost * self._workloads[device])
            for device, cost in enumerate(costs)
            if cost is not None
        }
        if len(times) < 2:  # one device alone may be slow because the machine is
            return
        mean = statistics.fmean(times.values())
        for device, time in times.items():
            self._deviations[device].append(time - mean)

    def _move(self, total: int) -> None:
        """Move the workloads if that is sure to gain; not where a device has a row at most."""
        measured = min(len(known) for known in self._deviations)
        if measured < _WINDOW or total <= self._num_devices:
            return
        deviations = [statistics.median(known) for known in self._deviations]
        moved = self._moved(deviations, total)
        if self._gain(deviations, moved, total) < _LEAST_GAIN:
            return
        self._workloads = moved
        for known in self._deviations:
            known.clear()

    def _moved(self, deviations: Sequence[float], total: int) -> tuple[float, ...]:
        """Return shares without most of the deviations, and a row for each device."""
        pairs = zip(self._workloads, deviations, strict=True)
        shares = _normalised([math.log(share) - _DAMPING * each for share, each in pairs])
        least = min(1 / self._num_devices, _ONE_ROW / total)
        scale = (1 - least * self._num_devices) / sum(max(0.0, each - least) for each in shares)
        return tuple([least + scale * max(0.0, each - least) for each in shares])

    def _gain(self, deviations: Sequence[float], moved: Sequence[float], total: int) -> float:
        """Return the part of the step's time that ``moved`` would save for ``total`` rows.

        In whole rows: where they are few, nothing may be gained by other workloads.
        """
        pairs = zip(self._workloads, deviations, strict=True)
        per_row = [math.exp(deviation) / share for share, deviation in pairs]
        now, then = (
            max(cost * rows for cost, rows in zip(per_row, sizes, strict=True))
            for sizes in (workload_sizes(total, self._workloads), workload_sizes(total, moved))
        )
        return 1 - then / now if now else 0.0


def least_loaded(candidates: Sequence[D], placed: Sequence[tuple[D, int]]) -> D:
    """Return the candidate that holds fewest bytes.

    Among equals the one with fewer modules, then the earlier candidate, so that modules without
    parameters are dealt out in turn.

    Args:
        candidates: Where a module may go.
        placed: (place, bytes) of every module that has one already, wherever that is.

    Example:
        >>> least_loaded(["a", "b"], [("a", 400), ("b", 100), ("b", 100)])
        'b'
        >>> least_loaded(["a", "b"], [("a", 0)])
        'b'

    Raises:
        ConfigError: There is no candidate.

    Source: fbcunn's ``nextGPU()``, which counted modules only, and not those placed by hand.
    """
    if not candidates:
        raise ConfigError("`candidates` must hold at least one device, but is empty.")

    def load(place: D) -> tuple[int, int]:
        sizes = [size for where, size in placed if where == place]
        return sum(sizes), len(sizes)

    return min(candidates, key=load)


def _cost(rows: int, seconds: float) -> float | None:
    """Return seconds per row; None where nothing was measured."""
    measured = rows > 0 and seconds > 0 and math.isfinite(seconds)
    return seconds / rows if measured else None


def _normalised(logs: Sequence[float]) -> tuple[float, ...]:
    """Return shares that add up to 1, from logarithms that may be far apart."""
    largest = max(logs)
    shares = [math.exp(log - largest) for log in logs]
    whole = math.fsum(shares)
    return tuple([share / whole for share in shares])
