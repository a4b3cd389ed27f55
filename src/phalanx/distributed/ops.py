"""Which reductions there are, and of which numbers.

SUM and AVG are ours, in the order of ranks, so all ranks get the same bits in every run. Numbers of
16 bits are added up as float32 and rounded once. Everything else is gloo's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.distributed.shared_memory import SUMMED_DTYPES
from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["average", "is_summed", "number_of", "widened"]

_OPS = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_HALVES = (torch.float16, torch.bfloat16)
_GLOOS_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_GLOOS_DTYPES = (torch.float32, torch.float64, *_HALVES, *_GLOOS_INTEGERS)


def number_of(op: object, dtype: torch.dtype) -> int:
    """Return the number of a ``ReduceOp``, for fingerprints.

    Raises:
        UnsupportedError: Neither we nor gloo have it, for numbers of ``dtype``.
        ConfigError: It cannot be, for these numbers.
    """
    kind = getattr(op, "op", op)
    number = next((at for at, known in enumerate(_OPS) if known == kind), None)
    if number is None:
        raise UnsupportedError(
            f"`op` must be SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, but is {kind}."
        )
    if dtype in SUMMED_DTYPES and number < 2:
        return number
    if kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"`op` must be arithmetic for {dtype}, but is {kind}.")
    if dtype not in _GLOOS_DTYPES or (number == 1 and not dtype.is_floating_point):
        names = ", ".join(str(each).removeprefix("torch.") for each in _GLOOS_DTYPES)
        raise UnsupportedError(
            f"`tensor` must be of a dtype that {kind} is built for ({names}; averages of int32 and "
            f"int64 only), but is of {dtype}. Convert it before."
        )
    return number


def is_summed(op: object, dtype: torch.dtype) -> bool:
    """Tell whether a reduction of such numbers is ours: a sum, or an average."""
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
