"""What a table is, and where its parts lie in its region.

    region   | page | values, states | records, of each shard |

A record takes the old rows of one block of an add (part.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.ipc import Region, aligned
from phalanx.plan import Staleness, check_argument, equal_sizes
from phalanx.tables.table_page import MAX_SHARDS, TablePage
from phalanx.tables.updaters import Updater, state_dtype, stored_updater

__all__ = [
    "DTYPES",
    "TableLayout",
    "TableSpec",
    "most_rows",
    "read_dtype",
    "view_parts",
    "view_record",
]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
BLOCK_ELEMENTS = 1 << 18  # changed at once, so that what was saved is still in the cache
_MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What all workers must agree on.

    Attributes:
        name: Of the table, within its run.
        rows: Number of rows, 0 or more.
        first_row: The number of the first of them: not 0 for a host's part of a table.
        cols: Row width D, at least 1.
        is_array: Whether it is shown as one dimension (then ``cols`` is 1).
        dtype: One of float32, float64, bfloat16, int32, int64.
        updater: How it takes a delta.
        num_shards: How many ranges of rows are locked apart.
        staleness: How far ahead a reader may be.
        nonfinite: What becomes of an add that holds NaN or infinity.
        capacity: Of a keys table: for how many keys there is room at first. Else 0.
        shape: The shape that users see; that of a keys table begins with 0.
        has_keys: Whether rows are found by key, and come as keys come.
    """

    name: str
    rows: int
    cols: int
    is_array: bool
    dtype: torch.dtype
    updater: Updater
    num_shards: int
    staleness: Staleness
    nonfinite: str
    capacity: int = 0
    first_row: int = 0
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    has_keys: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        shape = (self.rows,) if self.is_array else (self.rows, self.cols)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "has_keys", self.capacity > 0)
        wanted = (
            "be 1 to 100 letters, digits, dots, dashes and underscores, a letter or digit first"
        )
        check_argument(_NAME.fullmatch(str(self.name)) is not None, "name", wanted, self.name)
        for name, low in (("rows", 0), ("cols", 1), ("num_shards", 1), ("first_row", 0)):
            value = getattr(self, name)
            shown = "size" if self.is_array and name == "rows" else name
            fits = type(value) is int and value >= low
            check_argument(fits, shown, f"be an integer from {low} on", value)
        if max(self.first_row + self.rows, self.capacity) * self.cols > _MAX_ELEMENTS:
            told = (
                f"{self.capacity} rows of {self.cols}" if self.has_keys else f"shape {self.shape}"
            )
            raise ConfigError(
                f"A table must have at most {_MAX_ELEMENTS} elements, but has {told}."
            )
        fits = self.num_shards <= MAX_SHARDS
        check_argument(fits, "num_shards", f"be at most {MAX_SHARDS}", self.num_shards)
        fits = self.dtype.is_floating_point or self.updater.any_dtype
        wanted = f"be 'sum' for a table of {self.dtype}"
        check_argument(fits, "updater", wanted, self.updater.name)
        self.updater.check_dtype(self.dtype)
        fits = self.nonfinite in ("reject", "allow")
        check_argument(fits, "nonfinite", "be 'reject' or 'allow'", self.nonfinite)

    def entry_cols(self, assigns: bool) -> int:
        """Return how wide a row of an add's delta is, or of what is assigned."""
        return 2 * self.cols if self.updater.remembers and not assigns else self.cols

    def as_mapping(self) -> dict[str, object]:
        """Return the spec as JSON holds it, for the other workers, or beside a snapshot."""
        return {
            "name": self.name,
            "shape": ["keys", self.cols] if self.has_keys else list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "updater": self.updater.options(),
            "num_shards": self.num_shards,
            "staleness": self.staleness.bound,
            "nonfinite": self.nonfinite,
            "capacity": self.capacity,
            "first_row": self.first_row,
        }

    @classmethod
    def from_mapping(cls, found: object) -> TableSpec:
        """Read what :meth:`as_mapping` returned.

        Raises:
            ConfigError: It is no table's.
        """
        try:
            if not isinstance(found, dict):
                raise TypeError("it is no mapping")
            shape, capacity = found["shape"], found["capacity"]
            return cls(
                name=found["name"],
                rows=0 if capacity else shape[0],
                cols=shape[1] if len(shape) == 2 else 1,
                is_array=len(shape) == 1,
                dtype=read_dtype(found["dtype"]),
                updater=stored_updater(found["updater"]),
                num_shards=found["num_shards"],
                staleness=Staleness(found["staleness"]),
                nonfinite=found["nonfinite"],
                capacity=capacity,
                first_row=found.get("first_row", 0),  # snapshots of before have none
            )
        except (ValueError, KeyError, TypeError, IndexError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(
                f"A table must be described as tables are, but is by {found!r}."
            ) from exc

    def refuse_other(self, theirs: Mapping[str, object]) -> None:
        """Raise if another worker made the table of this name otherwise.

        Raises:
            ConfigError: Naming the first difference.
        """
        if theirs.get("first_row") != self.first_row:  # what the workers gave is another there
            raise ConfigError(
                f"`rows` of table {self.name!r} must be what its first worker gave, but is not: "
                f"this host's part begins with row {theirs.get('first_row')} there, and with row "
                f"{self.first_row} here."
            )
        for key, value in self.as_mapping().items():
            if theirs.get(key) != value:
                raise ConfigError(
                    f"`{key}` of table {self.name!r} must be what its first worker gave "
                    f"({theirs.get(key)!r}), but is {value!r}."
                )


@dataclass(frozen=True)
class TableLayout:
    """Offsets in the region of a table, in bytes.

    Attributes:
        parts: Where the values begin, then each state.
        widths: How wide a row of each of these is.
        records: For each shard, where its record of each of these begins.
        record_rows: For each shard, where the numbers of the rows in its record begin.
        record_sizes: How many rows each shard's record holds.
        shard_starts: The first row of each shard, and the end of the last.
        nbytes: The size of the region.
    """

    parts: tuple[int, ...]
    widths: tuple[int, ...]
    records: tuple[tuple[int, ...], ...]
    record_rows: tuple[int, ...]
    record_sizes: tuple[int, ...]
    shard_starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, spec: TableSpec, page_bytes: int | None = None) -> TableLayout:
        """Lay a table out, behind a page of that size; a :class:`TablePage` if None."""
        at = TablePage.needed_bytes(spec.num_shards) if page_bytes is None else page_bytes
        at = aligned(at)
        states = [spec.cols if kind == "element" else 1 for kind in spec.updater.states]
        widths = (spec.cols, *states)
        sizes = [spec.dtype.itemsize, *(state_dtype(spec.dtype).itemsize for _ in states)]

        def take(num_rows: int) -> tuple[int, ...]:
            nonlocal at
            starts = []
            for width, size in zip(widths, sizes, strict=True):
                starts.append(at)
                at = aligned(at + num_rows * width * size)
            return tuple(starts)

        parts = take(spec.rows)
        shard_starts = [0]
        for size in equal_sizes(spec.rows, spec.num_shards):
            shard_starts.append(shard_starts[-1] + size)
        most = most_rows(spec.cols)
        record_sizes = [max(1, min(b - a, most)) for a, b in pairwise(shard_starts)]
        records = tuple(take(num_rows) for num_rows in record_sizes)
        record_rows = []
        for num_rows in record_sizes:
            record_rows.append(at)
            at = aligned(at + 8 * num_rows)
        return cls(
            parts,
            widths,
            records,
            tuple(record_rows),
            tuple(record_sizes),
            tuple(shard_starts),
            max(at, 64),
        )


def most_rows(cols: int) -> int:
    """Return how many rows are changed at once: so many that the record stays in the cache."""
    return max(1, BLOCK_ELEMENTS // cols)


def _views(
    region: Region, spec: TableSpec, layout: TableLayout, starts: Sequence[int], num_rows: int
) -> list[Tensor]:
    dtypes = [spec.dtype, *(state_dtype(spec.dtype) for _ in layout.widths[1:])]
    return [
        region.tensor(dtype, num_rows * width, at).view(num_rows, width)
        for dtype, width, at in zip(dtypes, layout.widths, starts, strict=True)
    ]


def view_parts(region: Region, spec: TableSpec, layout: TableLayout) -> list[Tensor]:
    """Return the values and each state, as (rows, width)."""
    return _views(region, spec, layout, layout.parts, spec.rows)


def view_record(
    region: Region, spec: TableSpec, layout: TableLayout, index: int
) -> tuple[list[Tensor], Tensor]:
    """Return where a shard's old values and states go, and the numbers of their rows."""
    size = layout.record_sizes[index]
    parts = _views(region, spec, layout, layout.records[index], size)
    return parts, region.tensor(torch.int64, size, layout.record_rows[index])


def read_dtype(given: object) -> torch.dtype:
    """Return a table's dtype, given as torch's or by name."""
    dtype = DTYPES.get(given) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise ConfigError(f"`dtype` must be one of {', '.join(DTYPES)}, but is {given!r}.")
    return dtype
