"""Values that users give to a table, as tensors that can be trusted.

Everything is checked here, before anything is locked or changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.memory import all_finite, has_memory
from phalanx.tables.spec import TableSpec

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def read_rows(given: Any, spec: TableSpec) -> Tensor | None:
    """Return a list of rows or keys as (K,) int64; None for all rows.

    Keys are a copy; rows may be the caller's own. Whether they are within the table, its storage
    finds out (`Router.refuse_outside`).

    Raises:
        ConfigError: It is no list of integers, or keys are not given.
    """
    is_plain = type(given) is Tensor and given.dtype is torch.int64 and given.dim() == 1
    if is_plain and given.is_cpu and given.is_contiguous() and given.data_ptr():
        rows: Tensor = given  # what most callers give
    elif given is None:
        if spec.has_keys:
            raise ConfigError(
                f"`rows` must be keys of table {spec.name!r} to read or add to, but is None. Give "
                "`table.keys()` for all that are there."
            )
        return None
    else:
        rows = _numbers(given, "rows")
        if rows.dim() != 1 or (rows.dtype not in _INTEGERS and rows.numel()):
            raise ConfigError(
                f"`rows` must be a list of int64 numbers, but is of {rows.dtype} and shape "
                f"{tuple(rows.shape)}."
            )
        rows = rows.to(torch.int64)
    # A copy: keys are looked up twice, and another thread may change the caller's between the two.
    return rows.clone() if spec.has_keys else rows


def outside(rows: Tensor, spec: TableSpec) -> ConfigError:
    """Return the error that names a row outside of the table."""
    low, high = map(int, torch.aminmax(rows))
    return ConfigError(
        f"Row {low if low < 0 else high} is outside table {spec.name!r} of {spec.rows} rows. Make "
        "a larger table, or one by `world.keys`, which takes any int64 number."
    )


def _numbers(given: object, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a dense tensor on the CPU, whose memory holds them as they are.

    A value without a dtype, a list for instance, becomes of ``dtype`` if no number loses its
    fraction.
    """
    try:
        if isinstance(given, np.ndarray) and not given.flags.writeable:
            given = given.copy()  # else torch warns
        numbers = torch.as_tensor(given, device="cpu").detach()
        if dtype is not None and not isinstance(given, Tensor | np.ndarray):
            fits = numbers.numel() == 0 or torch.can_cast(numbers.dtype, dtype)
            numbers = torch.as_tensor(given, dtype=dtype, device="cpu") if fits else numbers
        if numbers.layout is not torch.strided:
            numbers = numbers.to_dense()
        numbers = numbers.contiguous().resolve_neg()
        if not has_memory(numbers):
            raise TypeError(f"a {type(given).__name__} without its own data")
        return numbers
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigError(
            f"`{name}` must hold plain numbers, in rows of equal length, but does not: {reason}. "
            "Give a tensor, an array or a list of numbers."
        ) from exc


def read_delta(given: Any, spec: TableSpec, num_rows: int | None, name: str = "delta") -> Tensor:
    """Return a delta as (K, D) of the table's dtype.

    Args:
        given: Tensor, numpy array or nested sequence. The first two must have the table's dtype.
        spec: The table.
        num_rows: K, or None for the whole table.
        name: What it is called in messages.

    Raises:
        ConfigError: Shape or dtype is another.
    """
    wanted = spec.shape if num_rows is None else (num_rows, *spec.shape[1:])
    is_plain = type(given) is Tensor and given.dtype is spec.dtype and given.shape == wanted
    is_plain = is_plain and given.is_cpu and given.is_contiguous() and not given.requires_grad
    if is_plain and given.data_ptr() and not given.is_neg():
        delta: Tensor = given  # what most callers give
        return delta.view(-1, 1) if spec.is_array else delta
    delta = _of_dtype(given, spec, name)
    if delta.shape == (0,):  # as an empty list is
        delta = delta.reshape(0, *wanted[1:])
    if delta.shape != wanted:
        raise ConfigError(
            f"`{name}` must have shape {wanted} for table {spec.name!r}, but has "
            f"{tuple(delta.shape)}."
        )
    return delta.view(-1, 1) if spec.is_array else delta


def _of_dtype(given: object, spec: TableSpec, name: str) -> Tensor:
    numbers = _numbers(given, name, spec.dtype)
    if numbers.dtype != spec.dtype:
        raise ConfigError(
            f"`{name}` must be of {spec.dtype} like table {spec.name!r}, but is of "
            f"{numbers.dtype}. Give `{name}.to({spec.dtype})`."
        )
    return numbers


def read_out(out: Any, spec: TableSpec, num_rows: int) -> Tensor:
    """Return ``out`` as (K, D), the same memory.

    Raises:
        ConfigError: It is no dense CPU tensor of the result's shape and dtype.
    """
    wanted = (num_rows, *spec.shape[1:])
    is_plain = type(out) is Tensor and out.dtype is spec.dtype and out.shape == wanted
    is_plain = is_plain and out.is_cpu and out.is_contiguous() and not out.requires_grad
    if not is_plain or out.is_neg() or not (out.data_ptr() or out.numel() == 0):
        shown = f"{out.dtype}, {tuple(out.shape)}" if isinstance(out, Tensor) else repr(out)
        raise ConfigError(
            f"`out` must be a tensor of {spec.dtype}, {wanted}, contiguous, on the CPU, that needs "
            f"no gradient, but is {shown}."
        )
    filled: Tensor = out
    return filled.view(-1, 1) if spec.is_array else filled


def read_init(given: Any, spec: TableSpec) -> Tensor:
    """Return the first values: of all rows, or one number (None for 0) without dimensions.

    Those of a keys table are one row, as (1, cols).

    Raises:
        ConfigError: It does not fit the table.
    """
    if given is None or (isinstance(given, int | float) and not isinstance(given, bool)):
        value = _of_dtype([given or 0], spec, "init").view(())
    elif spec.has_keys:
        row = given[None] if isinstance(given, Tensor | np.ndarray) else [given]
        value = read_delta(row, spec, 1, "init")
    else:
        value = read_delta(given, spec, None, "init")
    refuse_nonfinite(value, spec, "init")
    return value.expand(1, spec.cols) if spec.has_keys else value


def refuse_nonfinite(value: Tensor, spec: TableSpec, name: str = "delta") -> None:
    """Raise if numbers are not finite.

    Raises:
        ConfigError: They are not.
    """
    if not all_finite(value):
        raise nonfinite(spec, name)


def nonfinite(spec: TableSpec, name: str = "delta") -> ConfigError:
    """Return the error of numbers that are not finite."""
    return ConfigError(
        f"`{name}` must be finite for table {spec.name!r}, but holds NaN or infinity."
    )
