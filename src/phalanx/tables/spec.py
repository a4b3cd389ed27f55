"""The description of a table, on which all its workers must agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from phalanx.errors import ConfigError
from phalanx.plan import Staleness, check_argument
from phalanx.tables.updaters import Updater, parse_updater, state_dtype

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_ELEMENTS = 1 << 48


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
        staleness: How far ahead a reader may be.
        has_keys: Whether rows are found by key; they come as keys come, and there are 0 at first.
        shape: The shape that users see; that of a keys table begins with 0.
    """

    name: str
    rows: int
    cols: int
    is_array: bool
    dtype: torch.dtype
    updater: Updater
    staleness: Staleness
    has_keys: bool = False
    first_row: int = 0
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        shape = (self.rows,) if self.is_array else (self.rows, self.cols)
        object.__setattr__(self, "shape", shape)
        wanted = (
            "be 1 to 100 letters, digits, dots, dashes and underscores, a letter or digit first"
        )
        check_argument(NAME.fullmatch(str(self.name)) is not None, "name", wanted, self.name)
        for name, low in (("rows", 0), ("cols", 1), ("first_row", 0)):
            value = getattr(self, name)
            shown = "size" if self.is_array and name == "rows" else name
            fits = type(value) is int and value >= low
            check_argument(fits, shown, f"be an integer from {low} on", value)
        if max(1, self.first_row + self.rows) * self.cols > _MAX_ELEMENTS:
            raise ConfigError(
                f"A table must have at most {_MAX_ELEMENTS} elements, but has {self.rows} rows of "
                f"{self.cols}."
            )
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

    def as_mapping(self) -> dict[str, object]:
        """Return the spec as JSON holds it, for the other workers, or in a snapshot."""
        return {
            **{each.name: getattr(self, each.name) for each in fields(self) if each.init},
            "dtype": str(self.dtype).removeprefix("torch."),
            "updater": self.updater.options(),
            "staleness": self.staleness.bound,
        }

    @classmethod
    def from_mapping(cls, found: Any) -> TableSpec:  # Any: from JSON
        """Read what :meth:`as_mapping` returned.

        Raises:
            ConfigError: It is no table's.
        """
        try:
            read = {
                "dtype": read_dtype(found["dtype"]),
                "updater": parse_updater(found["updater"]),
                "staleness": Staleness(found["staleness"]),
            }
            return cls(**{**found, **read})
        except (KeyError, TypeError) as exc:
            raise ConfigError(
                f"A table must be described as tables are, but is by {found!r}."
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


def read_dtype(given: object) -> torch.dtype:
    """Return a table's dtype, given as torch's or by name."""
    dtype = DTYPES.get(given) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise ConfigError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {given!r}.")
    return dtype
