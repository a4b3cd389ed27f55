"""Rows of a matrix, copied and added to: by rows.c where that was compiled, else by torch.

Both give the same bits. The compiled loops fetch rows ahead, which takes half the time where rows
lie all over a large matrix, and cost one call each (docs/decisions/0015).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "MatrixRows",
    "all_finite",
    "all_within",
    "clamp_rows",
    "rows_compiled",
    "sum_to",
]

_VERSION = 5  # as in rows.c: one that was compiled from another is left alone
_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
}
_FINITE = {torch.float32: "finite_float32", torch.float64: "finite_float64"}
_ANSWERS = ("finite", "sum", "within")  # functions that return a truth
_FEW = 64
_ONE_THREAD = 32768  # elements from which on torch gives an operation to several threads

Array = np.ndarray[Any, Any]  # of any matrix's dtype
# Any: what ctypes makes of a C function.
Function = Callable[..., Any]


def _load(path: Path) -> ctypes.CDLL | None:
    """Return the compiled functions, or None where there are none, or those of another version."""
    try:
        library = ctypes.CDLL(str(path))
        version = library.phalanx_version
    except (OSError, AttributeError):
        return None
    version.restype = ctypes.c_int64
    return library if version() == _VERSION else None


def _functions(library: ctypes.CDLL | None) -> dict[str, Function]:
    """Return the functions by name, with the types of what they take."""
    if library is None:
        return {}
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    takes = {"take": [pointer, number, number, pointer, number, pointer]}
    for name in _NAMES.values():
        takes[f"add_{name}"] = [*takes["take"], pointer]
        takes[f"sum_{name}"] = [pointer, pointer, pointer, number]
    takes["finite_float32"] = takes["finite_float64"] = [pointer, number]
    takes["within"] = [pointer, number, number]
    takes["clamp"] = [pointer, number, number, pointer]
    found: dict[str, Function] = {}
    for name, types in takes.items():
        function = getattr(library, f"phalanx_{name}")
        function.argtypes = types
        function.restype = number if name.startswith(_ANSWERS) else None
        found[name] = function
    return found


_C = _functions(_load(Path(__file__).with_name("_rows.so")))


def rows_compiled() -> bool:
    """Tell whether rows.c was compiled when phalanx was installed."""
    return bool(_C)


def all_within(rows: Tensor, num_rows: int) -> bool:
    """Tell whether all of ``rows``, 1-D int64 on the CPU, are numbers from 0 to below ``num_rows``.

    Example:
        >>> all_within(torch.tensor([0, 4]), 5), all_within(torch.tensor([-1, 4]), 5)
        (True, False)
    """
    if "within" in _C and rows.is_contiguous():
        return bool(_C["within"](rows.data_ptr(), rows.numel(), num_rows))
    if rows.numel() <= _FEW:  # then Python is faster than torch
        return all(0 <= row < num_rows for row in rows.tolist())
    low, high = torch.aminmax(rows)
    return bool(low >= 0) and bool(high < num_rows)


def clamp_rows(rows: Tensor, num_rows: int, to: Tensor) -> None:
    """Copy row numbers to ``to``, contiguous; one outside of the matrix becomes the nearest inside.

    Example:
        >>> found = torch.empty(3, dtype=torch.int64)
        >>> clamp_rows(torch.tensor([-1, 3, 7]), 5, found)
        >>> found.tolist()
        [0, 3, 4]
    """
    function = _C.get("clamp")
    if function is not None and rows.is_contiguous():
        function(rows.data_ptr(), rows.numel(), num_rows, to.data_ptr())
    else:
        torch.clamp(rows, 0, num_rows - 1, out=to)


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
        self._take = _C.get("take")
        self._add = _C.get(f"add_{_NAMES.get(values.dtype)}")

    def take(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows into ``out`` [K, D], contiguous and of the same dtype."""
        if self._take is None or not rows.is_contiguous():
            torch.index_select(self.values, 0, rows, out=out)
            return
        self._take(
            self._at, self._num_rows, self._row_bytes, rows.data_ptr(), rows.numel(), out.data_ptr()
        )

    def save(self, rows: Tensor, record: MatrixRows, start: int) -> None:
        """Copy rows to where ``record``'s rows from ``start`` on lie; numbers are contiguous."""
        count = rows.numel()
        if self._take is None:
            # By numpy, which needs three quarters of torch's time; "clip", since else it takes them
            # elsewhere first.
            saved = _as_array(record.values)[start : start + count]
            _as_array(self.values).take(rows.numpy(), 0, saved, "clip")
            return
        to = record._at + start * self._row_bytes
        self._take(self._at, self._num_rows, self._row_bytes, rows.data_ptr(), count, to)

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


def sum_to(values: Tensor, delta: Tensor, to: Tensor) -> bool:
    """Write the sum of two tensors to a third, and tell whether ``delta`` is finite.

    All of one shape and dtype, contiguous. Past the cache, where compiled: for tensors that nobody
    reads soon.

    Example:
        >>> found = torch.empty(3)
        >>> sum_to(torch.ones(3), torch.arange(3.0), found)
        True
        >>> found.tolist()
        [1.0, 2.0, 3.0]
    """
    function = _C.get(f"sum_{_NAMES.get(to.dtype)}")
    if function is None:
        finite = all_finite(delta)
        torch.add(values, delta, out=to)
        return finite
    return bool(function(values.data_ptr(), delta.data_ptr(), to.data_ptr(), to.numel()))


def all_finite(numbers: Tensor) -> bool:
    """Tell whether neither NaN nor infinity is in ``numbers``, on the CPU.

    Example:
        >>> all_finite(torch.tensor([1.0, float("nan")])), all_finite(torch.ones(3))
        (False, True)
    """
    if not numbers.dtype.is_floating_point or numbers.numel() == 0:
        return True
    function = _C.get(_FINITE.get(numbers.dtype, ""))
    if function is not None and numbers.is_contiguous():
        return bool(function(numbers.data_ptr(), numbers.numel()))
    total = numbers.sum().item()
    if total - total == 0:  # as neither NaN nor infinity does; and one sum is a short look
        return True
    low, high = torch.aminmax(numbers)
    return bool(torch.isfinite(low) & torch.isfinite(high))
