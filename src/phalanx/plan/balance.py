"""From measured seconds to workloads: a slow device gets fewer rows, once that is sure.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from phalanx.errors import ConfigError
from phalanx.plan.slices import check_workloads, workload_sizes

__all__ = ["Balancer", "Decision", "fixed_workloads"]

_WINDOW = 7  # steps whose median counts: three late ones in a row move nothing
_DAMPING = 0.9  # the part of a deviation that one move takes away
_LEAST_GAIN = 0.05  # the part of a step's time that a move must save
_ONE_ROW = 1.01  # a hair more, which rounding cannot take away
_TRACE_LENGTH = 10_000


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome of one step's measurements.

    Attributes:
        step: Its number, from 1.
        seconds_per_row: By device; None where nothing was measured.
        proposed: Shares that would have been best in the last steps; they add up to 1.
        chosen: Shares for the next step.
        reason: Why it is these.
    """

    step: int
    seconds_per_row: tuple[float | None, ...]
    proposed: tuple[float, ...]
    chosen: tuple[float, ...]
    reason: str


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
        self._steps = 0
        self._trace: deque[Decision] = deque(maxlen=_TRACE_LENGTH)

    @property
    def workloads(self) -> tuple[float, ...]:
        """The shares for the next step; they add up to 1."""
        return self._workloads

    @property
    def trace(self) -> tuple[Decision, ...]:
        """All decisions, in order; the last 10,000 are kept."""
        return tuple(self._trace)

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self._workloads)
        return f"Balancer({shares} after {self._steps} steps)"

    def observe(self, rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
        """Take in the measurements of one step, and return the workloads for the next one.

        Args:
            rows: Of each device's slice.
            seconds: That each device took for it, without waiting for others or merging; 0 where it
                did nothing or too little to be measured.
        """
        self._steps += 1
        costs = [_cost(count, time_s) for count, time_s in zip(rows, seconds, strict=True)]
        self._note(costs)
        proposed, reason = self._decide(sum(rows))
        self._trace.append(
            Decision(
                step=self._steps,
                seconds_per_row=tuple(costs),
                proposed=proposed,
                chosen=self._workloads,
                reason=reason,
            )
        )
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

    def _decide(self, total: int) -> tuple[tuple[float, ...], str]:
        """Move the workloads if that is sure to gain; return the best ones, and the reason."""
        measured = min(len(known) for known in self._deviations)
        if measured < _WINDOW:
            return self._workloads, f"has measured {measured} of {_WINDOW} steps"
        if total <= self._num_devices:
            return self._workloads, "stays: one row for each device at most"
        deviations = [statistics.median(known) for known in self._deviations]
        best = self._moved(deviations, 1.0, total)
        moved = self._moved(deviations, _DAMPING, total)
        gain = self._gain(deviations, moved, total)
        if gain < _LEAST_GAIN:
            return best, f"stays: less than {_LEAST_GAIN:.0%} of the step to gain"
        self._workloads = moved
        for known in self._deviations:
            known.clear()
        return best, f"moves: {gain:.0%} of the step to gain"

    def _moved(self, deviations: Sequence[float], damping: float, total: int) -> tuple[float, ...]:
        """Return shares without that part of the deviations, and a row for each device."""
        pairs = zip(self._workloads, deviations, strict=True)
        shares = _normalised([math.log(share) - damping * each for share, each in pairs])
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


# Any: whatever the user wrote.
def fixed_workloads(workloads: Any) -> Sequence[float] | None:
    """Return the workloads that are given as numbers, None for those to be balanced: ``"auto"``.

    Raises:
        ConfigError: They are another word, or no numbers.
    """
    if workloads is None or isinstance(workloads, str):
        if workloads not in (None, "auto"):
            raise _no_workloads(workloads)
        return None
    # Arrays and tensors give their numbers by `tolist`; their elements may be no numbers of Python.
    listed = workloads.tolist() if hasattr(workloads, "tolist") else workloads
    if isinstance(listed, Mapping) or not isinstance(listed, Iterable):
        raise _no_workloads(workloads)
    shares = list(listed)
    if not all(isinstance(share, Real) for share in shares):
        raise _no_workloads(shares)
    return shares


def _no_workloads(given: object) -> ConfigError:
    return ConfigError(
        f"`workloads` must hold one share per device or be 'auto', but is {given!r:.80}. Give "
        "numbers, such as [1, 2]."
    )


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
