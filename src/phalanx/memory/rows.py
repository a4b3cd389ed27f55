"""Rows of a matrix, copied and added to: by native/rows.c where that was built, else by torch.

Both give the same bits. The compiled loops fetch rows ahead, which takes half the time where rows
lie all over a large matrix, and cost one call each (docs/decisions/0015).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import native
from phalanx.memory.blocks import PAST_CACHE_BYTES

__all__ = ["MatrixRows", "all_within", "clamp_rows"]

_FEW = 64
_ONE_THREAD = 32768  # elements from which on torch gives an operation to several threads

Array = np.ndarray[Any, Any]  # of any matrix's dtype


def all_within(rows: Tensor, num_rows: int, first_row: int = 0) -> bool:
    """Tell whether all of ``rows``, 1-D int64 on the CPU, are of the ``num_rows`` from the first.

    Example:
        >>> all_within(torch.tensor([0, 4]), 5), all_within(torch.tensor([0, 4]), 5, first_row=1)
        (True, False)
    """
    function = native.FUNCTIONS.get("within")
    if function is not None and rows.is_contiguous():
        return bool(function(rows.data_ptr(), rows.numel(), first_row, num_rows))
    stop = first_row + num_rows
    if rows.numel() <= _FEW:  # then Python is faster than torch
        return all(first_row <= row < stop for row in rows.tolist())
    low, high = torch.aminmax(rows)
    return bool(low >= first_row) and bool(high < stop)


def clamp_rows(rows: Tensor, num_rows: int, to: Tensor, first_row: int = 0) -> None:
    """Copy row numbers to ``to``, contiguous, counted from ``first_row``.

    One outside of the matrix becomes the nearest inside.

    Example:
        >>> found = torch.empty(3, dtype=torch.int64)
        >>> clamp_rows(torch.tensor([9, 13, 17]), 5, found, first_row=10)
        >>> found.tolist()
        [0, 3, 4]
    """
    function = native.FUNCTIONS.get("clamp")
    if function is not None and rows.is_contiguous():
        function(rows.data_ptr(), rows.numel(), first_row, num_rows, to.data_ptr())
    else:
        torch.clamp(rows - first_row, 0, num_rows - 1, out=to)


class MatrixRows:
    """The rows of a matrix that stays where it is.

    Row numbers are 1-D int64 tensors on the CPU, which the caller has checked to be within.

    Args:
        values: [N, D], contiguous, on the CPU, of any dtype.

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
        self._picked = values.new_empty((0, self._num_cols))  # kept: its pages are there then
        self._take = native.FUNCTIONS.get("take")
        self._add = native.compiled_for("add", values.dtype)

    def take(self, rows: Tensor, out: Tensor, first_row: int = 0) -> None:
        """Copy rows, counted from ``first_row``, into ``out`` [K, D], contiguous, of this dtype."""
        if self._take is None or not rows.is_contiguous():
            numbers = rows - first_row if first_row else rows
            torch.index_select(self.values, 0, numbers, out=out)
            return
        count = rows.numel()
        past = count * self._row_bytes >= PAST_CACHE_BYTES
        at, num_rows, size, to = self._at, self._num_rows, self._row_bytes, out.data_ptr()
        self._take(at, num_rows, size, rows.data_ptr(), count, first_row, to, past)

    def save(self, rows: Tensor, record: MatrixRows, start: int, *, past: bool = False) -> None:
        """Copy rows to where ``record``'s rows from ``start`` on lie; numbers are contiguous.

        Past the caches if told, for a record that is longer than they are.
        """
        count = rows.numel()
        if self._take is None:
            # By numpy, which needs three quarters of torch's time; "clip", since else it takes them
            # elsewhere first.
            saved = _as_array(record.values)[start : start + count]
            _as_array(self.values).take(rows.numpy(), 0, saved, "clip")
            return
        to = record._at + start * self._row_bytes
        at, num_rows, size = self._at, self._num_rows, self._row_bytes
        self._take(at, num_rows, size, rows.data_ptr(), count, 0, to, past)

    def add(
        self, rows: Tensor, delta: Tensor, scale: float = 1, places: Tensor | None = None
    ) -> None:
        """Add ``scale`` times ``delta`` [K, D], contiguous, to rows, one after the other.

        A row that is given twice is added to twice. Where ``places`` are given, contiguous and
        within ``delta``, those rows of it are meant.
        """
        count = rows.numel()
        if scale == 1 and self._add is not None and delta.is_contiguous():
            to, of = rows.data_ptr(), None if places is None else places.data_ptr()
            self._add(self._at, self._num_rows, self._num_cols, to, count, delta.data_ptr(), of)
            return
        if places is not None:
            delta = self._pick(delta, places)
        if scale == 1 and count <= _FEW and delta.numel() < _ONE_THREAD:
            # The same sums in the same order as the other's, in a third of the time. Of more
            # elements torch would let threads add, in any order.
            self.values.index_put_((rows,), delta, accumulate=True)
        else:
            self.values.index_add_(0, rows, delta, alpha=scale)

    def _pick(self, delta: Tensor, places: Tensor) -> Tensor:
        """Return rows of a delta, good until the next."""
        if self._picked.shape[0] < places.numel():
            with torch.inference_mode(False):  # else nobody could write to it outside of it
                self._picked = delta.new_empty((places.numel(), self._num_cols))
        picked = self._picked[: places.numel()]
        MatrixRows(delta).take(places, picked)
        return picked


def _as_array(values: Tensor) -> Array:
    """Return the same memory, of which rows are only copied; numpy has no bfloat16."""
    return values.view(torch.int16).numpy() if values.dtype == torch.bfloat16 else values.numpy()
