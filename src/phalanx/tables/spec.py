"""The description of a table, on which all its workers must agree."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.native import DTYPES
from phalanx.plan import check_argument, read_count
from phalanx.tables.updaters import Updater, parse_updater, state_dtype

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_ELEMENTS = 1 << 48
_STEP = np.uint64(0x9E3779B97F4A7C15)


def mix(numbers: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits for each number, every one of which depends on all of the number's.

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); a bijection.
    """
    x = numbers.astype(np.uint64)
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

    def draw(self, keys: NDArray[np.int64], cols: int) -> Tensor:
        """Return the rows of ``keys``, as (K, cols) float64."""
        start = mix(np.array([self.seed]).view(np.uint64))
        of_row = mix(keys.view(np.uint64) + start)
        words = mix(of_row[:, None] + np.arange(1, cols + 1, dtype=np.uint64) * _STEP)
        shares = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(self.low + shares * (self.high - self.low))


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """The properties of a table on which all workers must agree.

    Attributes:
        name: Of the table, within its run.
        rows: Number of rows, 0 or more.
        first_row: The number of the first of them: not 0 for a host's part of a table.
        cols: Row width D, at least 1.
        is_array: Whether it is shown as one dimension (then ``cols`` is 1).
        dtype: One of float32, float64, bfloat16, int32, int64.
        updater: How it takes a delta.
        staleness: Rounds by which a reader may lead the slowest worker; None: any number.
        has_keys: Whether rows are found by key; they come as keys come, and there are 0 at first.
        rule: By what first rows of keys are drawn; None where all are the same.
        shape: The shape that users see; that of a keys table begins with 0.
    """

    name: str
    rows: int
    cols: int
    is_array: bool
    dtype: torch.dtype
    updater: Updater
    staleness: int | None
    has_keys: bool = False
    rule: Uniform | None = None
    first_row: int = 0
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        shape = (self.rows,) if self.is_array else (self.rows, self.cols)
        object.__setattr__(self, "shape", shape)
        check_name("name", self.name)
        for name, low in (("rows", 0), ("cols", 1), ("first_row", 0)):
            value = getattr(self, name)
            shown = "size" if self.is_array and name == "rows" else name
            fits = type(value) is int and value >= low
            check_argument(fits, shown, f"be an integer from {low} on", value)
        if self.staleness is not None:
            read_count("staleness", self.staleness, 0)
        if max(1, self.first_row + self.rows) * self.cols > _MAX_ELEMENTS:
            raise ConfigError(
                f"A table must have at most {_MAX_ELEMENTS} elements, but has {self.rows} rows of "
                f"{self.cols}."
            )
        fits = self.dtype.is_floating_point or self.rule is None
        check_argument(fits, "init", f"be an integer or a row for {self.dtype}", self.rule)
        fits = self.dtype.is_floating_point or self.updater.any_dtype
        wanted = f"be 'sum' for a table of {self.dtype}"
        check_argument(fits, "updater", wanted, self.updater.name)

    @property
    def columns(self) -> list[tuple[torch.dtype, int]]:
        """Dtype and row width of the values, and of each of the updater's states."""
        dtype, cols = state_dtype(self.dtype), self.cols
        widths = [cols if kind == "element" else 1 for kind in self.updater.states]
        return [(self.dtype, cols), *((dtype, width) for width in widths)]

    def parts(self, num_rows: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of all that so many rows have: [keys], values, states."""
        columns = [(dtype, (num_rows, width)) for dtype, width in self.columns]
        return [(torch.int64, (num_rows,)), *columns] if self.has_keys else [*columns]

    @property
    def delta_cols(self) -> int:
        """The width of a row of an add's delta."""
        return 2 * self.cols if self.updater.is_wide else self.cols

    def to_json(self) -> str:
        """Return what :meth:`from_json` reads, on this host or another."""
        return json.dumps(self.as_mapping())

    def as_mapping(self) -> dict[str, object]:
        """Return the spec as JSON holds it, for the other workers, or in a snapshot."""
        return {
            **{each.name: getattr(self, each.name) for each in fields(self) if each.init},
            "dtype": DTYPES[self.dtype],
            "updater": self.updater.options(),
            "rule": self.rule and asdict(self.rule),
        }

    @classmethod
    def from_json(cls, text: str) -> TableSpec:
        """Read what :meth:`to_json` returned.

        Raises:
            ConfigError: It is no table's.
        """
        try:
            found = json.loads(text)
            read = {
                "dtype": read_dtype(found["dtype"]),
                "updater": parse_updater(found["updater"]),
                "rule": found["rule"] and Uniform(**found["rule"]),
            }
            return cls(**{**found, **read})
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(
                f"A table must be described as tables are, but is by {text}."
            ) from exc

    def refuse_other(self, theirs: Mapping[str, object]) -> None:
        """Raise if another worker made the table of this name otherwise.

        Raises:
            ConfigError: Naming the first difference.
        """
        for key, value in self.as_mapping().items():
            if theirs.get(key) != value:
                raise ConfigError(
                    f"`{key}` of table {self.name!r} must be {theirs.get(key)!r}, as its first "
                    f"worker gave it, but is {value!r}."
                )


def check_name(argument: str, given: object) -> None:
    """Raise if something is no name of a run, or of a table, which are names of files."""
    wanted = "be 1 to 100 letters, digits, dots, dashes and underscores, a letter or digit first"
    check_argument(bool(isinstance(given, str) and NAME.fullmatch(given)), argument, wanted, given)


def read_dtype(given: object) -> torch.dtype:
    """Return a table's dtype, given as torch's or by name."""
    for dtype, name in DTYPES.items():
        if given in (dtype, name):
            return dtype
    raise ConfigError(f"`dtype` must be one of {', '.join(DTYPES.values())}, but is {given!r}.")
