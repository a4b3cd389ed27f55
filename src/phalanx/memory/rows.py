"""Rows of a matrix, copied and added to by native/rows.c.

It fetches rows ahead, which takes half of torch's time where rows lie all over a large matrix
(docs/decisions/0015).
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.memory.blocks import PAST_CACHE_BYTES
from phalanx.native import DTYPES, FUNCTIONS


def all_within(rows: Tensor, num_rows: int, first_row: int = 0) -> bool:
    """Tell whether all of ``rows``, contiguous int64, are of the ``num_rows`` from the first.

    Example:
        >>> all_within(torch.tensor([0, 4]), 5), all_within(torch.tensor([0, 4]), 5, first_row=1)
        (True, False)
    """
    return bool(FUNCTIONS["within"](rows.data_ptr(), rows.numel(), first_row, num_rows))


_FIRST = torch.zeros(1, dtype=torch.int64, device="cpu")


class MatrixRows:
    """The rows of a matrix that stays where it is.

    Row numbers are contiguous int64 tensors on the CPU, which the caller has checked to be within.

    Args:
        values: [N, D], contiguous, on the CPU, of a table's dtype.

    Example:
        >>> values = torch.zeros(5, 2)
        >>> MatrixRows(values).add(torch.tensor([3, 1, 3]), torch.ones(3, 2))
        >>> values[:, 0].tolist()
        [0.0, 1.0, 0.0, 2.0, 0.0]
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._num_rows, self._num_cols = values.shape
        self._row_bytes = self._num_cols * values.itemsize
        self._at = values.data_ptr()
        self._take = FUNCTIONS["take"]
        self._add = FUNCTIONS[f"add_{DTYPES[values.dtype]}"]

    def take(self, rows: Tensor, out: Tensor, first_row: int = 0) -> None:
        """Copy rows, counted from ``first_row``, into ``out`` [K, D], contiguous, of this dtype."""
        count = rows.numel()
        past = count * self._row_bytes >= PAST_CACHE_BYTES
        at, num_rows, size, to = self._at, self._num_rows, self._row_bytes, out.data_ptr()
        self._take(at, num_rows, size, rows.data_ptr(), count, first_row, to, past)

    def add(
        self, rows: Tensor, delta: Tensor, scale: float = 1, places: Tensor | None = None
    ) -> None:
        """Add ``scale`` times ``delta`` [K, D], contiguous, to rows, one after the other.

        A row that is given twice is added to twice. Where ``places`` are given, contiguous and
        within ``delta``, those rows of it are meant.
        """
        numbers, source = rows.data_ptr(), delta.data_ptr()
        of = None if places is None else places.data_ptr()
        shape = (self._num_rows, self._num_cols)
        self._add(self._at, *shape, numbers, rows.numel(), source, of, scale)

    def add_span(self, first: int, delta: Tensor, scale: float = 1) -> None:
        """Add ``scale`` times ``delta`` [K, D], contiguous, to the K rows from ``first`` on."""
        at = self._at + first * self._row_bytes
        self._add(at, 1, delta.numel(), _FIRST.data_ptr(), 1, delta.data_ptr(), None, scale)
