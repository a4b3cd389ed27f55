"""The division of a table's rows over hosts, each of which has a part.

rows   0 1 2 3 │ 4 5 6 7 │ 8 9 10     of numbered rows each host has a range;
host         0 │       1 │      2     of keys, those that hash to it
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.memory import all_within
from phalanx.plan import equal_sizes
from phalanx.tables.row_initializer import mix
from phalanx.tables.spec import TableSpec

_KEYS_SEED = np.int64(0x5DEECE66D)


class Share(NamedTuple):
    """The share of one part in a list of rows, or in the whole table.

    Attributes:
        part: Its index.
        rows: Or keys, in the order of the list; None for all of the part.
        span: Where they are in the list sorted by part.
    """

    part: int
    rows: Tensor | None
    span: slice


class Cut:
    """The cut of one table, as one host sees it.

    Args:
        spec: The table, of all hosts.
        host: This host's number.
        num_hosts: How many there are.

    Attributes:
        num_parts: How many parts there are, one on each host.
        own: The index of this host's part.
    """

    def __init__(self, spec: TableSpec, host: int, num_hosts: int) -> None:
        self._spec = spec
        self.num_parts = num_hosts
        self.own = host
        sizes = equal_sizes(spec.rows, num_hosts)
        self._starts = list(accumulate(sizes, initial=0))
        self._bounds = np.array(self._starts[1:-1], dtype=np.int64)

    # --- ranges of rows ---------------------------------------------------------------------------

    def span(self, index: int) -> slice:
        """Return where a part's rows lie in a tensor of all rows."""
        return slice(self._starts[index], self._starts[index + 1])

    def part(self, index: int) -> TableSpec:
        """Return what a part is: a separate table on its host."""
        if self.num_parts == 1 or self._spec.has_keys:
            return self._spec
        first, stop = self._starts[index : index + 2]
        return replace(self._spec, rows=stop - first, first_row=first)

    # --- lists of rows ----------------------------------------------------------------------------

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the part of each row."""
        if not self._spec.has_keys:
            return np.searchsorted(self._bounds, rows, side="right").astype(np.uint16)
        mixed = mix(rows ^ _KEYS_SEED) >> np.uint64(32)
        return (mixed % np.uint64(self.num_parts)).astype(np.uint16)

    def shares(self, rows: Tensor | None) -> tuple[Tensor | None, list[Share]]:
        """Cut a list of rows, None for the whole table, by part; rows of one part stay in order.

        Returns:
            Where in the list the sorted rows stood, None where they are sorted already; and a share
            for each part that has any.
        """
        if rows is None:
            return None, [Share(index, None, self.span(index)) for index in range(self.num_parts)]
        index = self.only_part(rows)
        if index is not None:
            return None, [Share(index, rows, slice(None))]
        # In numpy: it needs half of torch's time for few rows, and sorts small numbers by counting.
        numbers = rows.numpy()
        owners = self.owners(numbers)
        order = np.argsort(owners, kind="stable")
        ends = np.bincount(owners, minlength=self.num_parts).cumsum().tolist()
        sorted_rows = torch.from_numpy(numbers.take(order))
        spans = map(slice, [0, *ends], ends)
        shares = [Share(i, sorted_rows[s], s) for i, s in enumerate(spans) if s.start < s.stop]
        return torch.from_numpy(order), shares

    def only_part(self, rows: Tensor | None) -> int | None:
        """Return the part that has all of these rows, None for all there are.

        None where no part has, or by a longer look.
        """
        if self.num_parts == 1 or (rows is not None and not rows.numel()):
            return self.own
        if rows is None or self._spec.has_keys:
            return None
        index = bisect_right(self._starts, rows[0].item(), 1, self.num_parts) - 1
        start, stop = self._starts[index : index + 2]
        return index if all_within(rows, stop - start, start) else None
