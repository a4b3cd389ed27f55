"""Which reductions there are, and of which numbers.

They go in the order of ranks, so all ranks get the same bits in every run. Numbers of 16 bits are
reduced as float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.distributed.shared_memory import SUMMED_DTYPES
from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["average", "combined", "is_summed", "number_of", "widened"]

_COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
_HALVES = (torch.float16, torch.bfloat16)


def number_of(op: object, dtype: torch.dtype) -> int:
    """Return the number of a ``ReduceOp``, for fingerprints.

    Raises:
        UnsupportedError: It is not built.
        ConfigError: It cannot be, for numbers of ``dtype``.
    """
    kind = getattr(op, "op", op)
    number = next((at for at, known in enumerate(_COMBINE) if known == kind), None)
    if number is None:
        raise UnsupportedError(
            f"`op` must be SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, but is {kind}."
        )
    if (kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex)) or (
        kind in _ORDERED and dtype.is_complex
    ):
        raise ConfigError(f"`op` must be arithmetic for {dtype}, but is {kind}.")
    return number


def combined(op: object, parts: Sequence[Tensor]) -> Tensor:
    """Return what the reduction makes of ``parts``, in their order; no average yet."""
    return reduce(_COMBINE[getattr(op, "op", op)], parts)


def is_summed(op: object, dtype: torch.dtype) -> bool:
    """Tell whether C adds up such numbers: for a sum, or an average."""
    ours = dtype in SUMMED_DTYPES or dtype in _HALVES
    return ours and getattr(op, "op", op) in (ReduceOp.SUM, ReduceOp.AVG)


def widened(flat: Tensor, op: object, *, takes_halves: bool) -> Tensor:
    """Return the numbers that are reduced: ``flat`` itself, or a copy as float32.

    Args:
        flat: Numbers of a rank.
        op: How they are reduced.
        takes_halves: Whether a sum of bfloat16 is rounded once all the same.
    """
    if flat.dtype not in _HALVES:
        return flat
    kind = getattr(op, "op", op)
    if takes_halves and flat.dtype in SUMMED_DTYPES and kind == ReduceOp.SUM:
        return flat
    return flat.float()


def average(total: Tensor, op: object, num_ranks: int) -> None:
    """Divide ``total`` where the reduction is an average; integers towards zero."""
    if getattr(op, "op", op) == ReduceOp.AVG:
        total.div_(num_ranks, rounding_mode=None if total.is_floating_point() else "trunc")
