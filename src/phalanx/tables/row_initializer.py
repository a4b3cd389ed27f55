"""The first values of rows that are made as keys come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.plan import check_argument

_STEP = np.uint64(0x9E3779B97F4A7C15)

Int64s = NDArray[np.int64]
_Words = NDArray[np.uint64]


def mix(numbers: NDArray[Any]) -> _Words:
    """Return 64 bits for each number, every one of which depends on all of the number's.

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); a bijection.
    """
    x: _Words = numbers.astype(np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@dataclass(frozen=True)
class Uniform:
    """First rows of a keys table, drawn evenly between two numbers.

    A row depends on its key and the seed alone, not on the worker that makes it, nor on the order.
    The numbers are not torch's.

    Args:
        low: Nothing less is drawn.
        high: Nothing more is drawn.
        seed: Another one draws other rows; an int64.

    Raises:
        ConfigError: The bounds are no finite numbers in this order, or the seed is no int64.

    Example:
        >>> from phalanx import tables
        >>> with tables.join() as world:
        ...     table = world.keys(2, init=tables.Uniform(-0.5, 0.5, seed=3))
        ...     first = table.get([-7])
        ...     table.add([[1.0, 2.0]], rows=[-7])
        ...     torch.equal(table.get([-7]), first + torch.tensor([1.0, 2.0]))
        True
    """

    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        fits = -math.inf < self.low < self.high < math.inf
        check_argument(fits, "low", f"be finite and below `high` ({self.high!r})", self.low)
        fits = type(self.seed) is int and -(1 << 63) <= self.seed < 1 << 63
        check_argument(fits, "seed", "be an integer of 64 bits", self.seed)

    def draw(self, keys: Int64s, cols: int) -> Tensor:
        """Return the rows of ``keys``, as (K, cols) float64."""
        start = mix(np.array([self.seed]).view(np.uint64))
        of_row = mix(keys.view(np.uint64) + start)
        words = mix(of_row[:, None] + np.arange(1, cols + 1, dtype=np.uint64) * _STEP)
        shares = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(self.low + shares * (self.high - self.low))
