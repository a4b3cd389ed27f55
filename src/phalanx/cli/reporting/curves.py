"""From numbers to a chart's coordinates: pure, so that tests need no browser."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.cli.reporting.runs import Floats

__all__ = ["Axis", "Thinned", "format_tick", "span_of", "thin"]

_MOST_POINTS = 400  # more would not be seen, and make a page of megabytes
_MARGIN = 0.04
# Beyond this ratio of the largest to the smallest value a linear axis shows only the beginning.
_LOG_RATIO = 20.0
_FEWEST_TICKS = 3  # of an axis; a logarithmic one with fewer gets more within each decade


class Thinned(NamedTuple):
    """At most some hundred points of a curve: means of neighbours, and their extremes."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def thin(x: Floats, y: Floats, weights: Floats | None = None) -> Thinned:
    """Put neighbours together until there are few points; values that are not finite are left out.

    Args:
        x: Ascending.
        y: As many.
        weights: With which each value counts; default: alike.

    Example:
        >>> thin(np.arange(3.0), np.array([1.0, np.nan, 5.0])).mean.tolist()
        [1.0, nan, 5.0]
    """
    starts = np.unique(
        np.linspace(0, len(x), min(len(x), _MOST_POINTS), endpoint=False).astype(int)
    )
    weights = np.ones(len(x)) if weights is None else weights
    finite = np.isfinite(y) & np.isfinite(weights)
    weights = np.where(finite, weights, 0.0)
    sums = np.add.reduceat(weights, starts)
    totals = np.add.reduceat(np.where(finite, y, 0.0) * weights, starts)
    empty = ~np.logical_or.reduceat(finite, starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = totals / sums
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    low[empty] = high[empty] = np.nan
    ends = np.append(starts[1:], len(x)) - 1
    return Thinned(x[ends], mean, low, high)


@dataclass(frozen=True)
class Axis:
    """A range of values on a line from 0 to 1.

    Args:
        low: The value at 0.
        high: That at 1, above ``low``.
        is_log: Whether equal ratios are equally long.
    """

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Floats, *, from_zero: bool = False, may_be_log: bool = False) -> Axis:
        """Return an axis on which all finite values have a place, with some room around them.

        Example:
            >>> Axis.over(np.array([2.0, 0.01, 1.0]), may_be_log=True).is_log
            True
        """
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        if may_be_log and low > 0 and high / low > _LOG_RATIO:
            room = (high / low) ** _MARGIN
            return cls(low / room, high * room, is_log=True)
        if from_zero:
            low = min(low, 0.0)
        room = (high - low) * _MARGIN or abs(high) * _MARGIN or 1.0
        return cls(low if from_zero and low == 0.0 else low - room, high + room)

    def place(self, values: Floats) -> Floats:
        """Return where values lie.

        Example:
            >>> Axis(10.0, 20.0).place(np.array([15.0])).tolist()
            [0.5]
        """
        if not self.is_log:
            return (values - self.low) / (self.high - self.low)
        with np.errstate(invalid="ignore", divide="ignore"):
            placed: Floats = np.log(values / self.low) / math.log(self.high / self.low)
        return placed

    def ticks(self) -> list[float]:
        """Return some round values, ascending.

        Example:
            >>> Axis(0.0, 230.0).ticks()
            [0.0, 50.0, 100.0, 150.0, 200.0]
            >>> Axis(0.008, 3.0, is_log=True).ticks()
            [0.01, 0.1, 1.0]
        """
        if self.is_log:
            for digits in ((1,), (1, 2, 5)):
                found = self._log_ticks(digits)
                if len(found) >= _FEWEST_TICKS:
                    return found[:: math.ceil(len(found) / 8)]
        width = self.high - self.low
        rough = width / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [float(f"{number * step:.12g}") for number in numbers]

    def _log_ticks(self, digits: tuple[int, ...]) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [float(f"{digit}e{power}") for power in powers for digit in digits]
        return [value for value in values if self.low <= value <= self.high]


def span_of(steps: list[Floats]) -> Axis:
    """Return the axis of all runs' steps."""
    first, last = min(each[0] for each in steps), max(each[-1] for each in steps)
    return Axis(float(first), float(last if last > first else first + 1))


def format_tick(value: float, *, is_percent: bool = False) -> str:
    """Write a value beside an axis.

    Example:
        >>> format_tick(12000.0), format_tick(0.25, is_percent=True), format_tick(1e-7)
        ('12,000', '25 %', '1e-07')
    """
    if is_percent:
        return f"{100 * value:.6g} %"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.6g}"
