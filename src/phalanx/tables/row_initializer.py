"""The first value of a row, where rows are made as keys come.

Every worker must see the same row under a key that is not there yet, so the rule lies in shared
memory: the master writes it, all read it.

    words    | KIND | LOW | HIGH | SEED | · · · · |      LOW and HIGH are the bits of a float64
    row      the constant row; zeros where KIND says uniform
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.ipc import Region
from phalanx.plan import check_argument
from phalanx.tables.spec import TableSpec
from phalanx.tables.values import read_init

_KIND, _LOW, _HIGH, _SEED = range(4)
_UNIFORM = 1  # else all rows are the same
_HEAD_BYTES = 64
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


RowInit = Uniform | Tensor
"""A rule, or the row itself as (1, cols)."""


def read_row_init(given: object, spec: TableSpec) -> RowInit:
    """Return what a user gave as ``init`` of a keys table.

    Raises:
        ConfigError: It is neither a number, nor a row of the table, nor a rule that fits its dtype.
    """
    if isinstance(given, Uniform):
        wanted = f"be an integer or a row for {spec.dtype}"
        check_argument(spec.dtype.is_floating_point, "init", wanted, given)
        return given
    if isinstance(given, Tensor | np.ndarray):
        given = given[None]
    elif given is not None and not isinstance(given, int | float):
        given = [given]
    row = read_init(given, spec, 1)
    return row.expand(1, spec.cols)  # a number takes no memory here, for as many as that may be


class RowInitializer:
    """The rule in shared memory.

    Args:
        spec: The table.
        region: Where it lies; zeros, which mean a row of zeros, until :meth:`write`.
        offset_bytes: Where it begins.
    """

    def __init__(self, spec: TableSpec, region: Region, offset_bytes: int) -> None:
        head = region.buffer[offset_bytes : offset_bytes + _HEAD_BYTES]
        self._words, self._bounds = head.cast("q"), head.cast("d")
        self._row = region.tensor(spec.dtype, spec.cols, offset_bytes + _HEAD_BYTES).view(1, -1)

    def write(self, first: RowInit) -> None:
        """Lay the rule down, before anybody reads it."""
        if isinstance(first, Tensor):
            self._row.copy_(first)
            return
        self._bounds[_LOW], self._bounds[_HIGH] = first.low, first.high
        self._words[_SEED] = first.seed
        self._words[_KIND] = _UNIFORM

    @property
    def row_at(self) -> int:
        """The address of the constant row."""
        return self._row.data_ptr()

    def is_uniform(self) -> bool:
        """Tell whether each row has its own numbers."""
        return self._words[_KIND] == _UNIFORM

    def rows_for(self, keys: Int64s) -> Tensor:
        """Return the first rows of ``keys``: (K, cols), or (1, cols) where all are the same."""
        if not self.is_uniform():
            return self._row
        rule = Uniform(self._bounds[_LOW], self._bounds[_HIGH], self._words[_SEED])
        return rule.draw(keys, self._row.shape[1]).to(self._row.dtype)
