"""Reductions of several ranks' numbers, always in the order of ranks.

    SUM of four ranks:   ((r0 + r1) + r2) + r3

so every rank that reduces gets the same bits, whoever it is and whoever came first. float16 and
bfloat16 are accumulated in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["Reduction", "reduction_of"]

Combine = Callable[..., object]  # (left, right, *, out)

_HALVES = (torch.float16, torch.bfloat16)
_COMBINE_BY_OP: dict[object, Combine] = {
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
_NUMBER_BY_OP = {op: number for number, op in enumerate(_COMBINE_BY_OP)}


@dataclass(frozen=True)
class Reduction:
    """How numbers of one dtype become one.

    Attributes:
        number: Which operation, as an integer that all ranks agree on.
        name: What it is called.
    """

    number: int
    name: str
    _combine: Combine
    _dtype: torch.dtype
    _averages: bool

    def __call__(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Reduce ``sources``, one per rank and in their order, into ``out``.

        ``out`` may be the memory of the first or the second source, and of no other.
        """
        if self._dtype in _HALVES:
            out.copy_(self._folded([source.float() for source in sources], None))
            return
        self._folded(sources, out)

    def _folded(self, sources: Sequence[Tensor], out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty_like(sources[0])
        if len(sources) == 1:
            out.copy_(sources[0])
        else:
            self._combine(sources[0], sources[1], out=out)
        for source in sources[2:]:
            self._combine(out, source, out=out)
        if self._averages:
            whole = None if out.is_floating_point() or out.is_complex() else "trunc"
            out.div_(len(sources), rounding_mode=whole)
        return out


def reduction_of(op: object, dtype: torch.dtype) -> Reduction:
    """Return how to reduce numbers of ``dtype`` by a ``ReduceOp``.

    Raises:
        ConfigError: These numbers cannot be reduced so.
        UnsupportedError: This operation is not built.
    """
    return _reduction_of(getattr(op, "op", op), dtype)


@cache
def _reduction_of(kind: object, dtype: torch.dtype) -> Reduction:
    found = next((known for known in _COMBINE_BY_OP if known == kind), None)
    if found is None:
        raise UnsupportedError(
            f"`op` must be SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, but is {kind}. Scale "
            "the tensor first, and give SUM."
        )
    inexact = dtype.is_floating_point or dtype.is_complex
    if found in _BITWISE and inexact:
        raise ConfigError(f"`op` must be arithmetic for {dtype}, but is {kind}.")
    if found in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise ConfigError(f"`op` must not need an order for {dtype}, but is {kind}.")
    return Reduction(
        _NUMBER_BY_OP[found],
        str(kind).rpartition(".")[2],
        _COMBINE_BY_OP[found],
        dtype,
        found == ReduceOp.AVG,
    )
