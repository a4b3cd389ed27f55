"""Reductions of several ranks' numbers, always in the order of ranks.

    SUM of four ranks:   ((r0 + r1) + r2) + r3

so each rank that reduces gets the same bits, also if ranks come in another order. float16 and
bfloat16 are accumulated in float32 and rounded once, at the end.

PREMUL_SUM has each rank scale what it gives by a factor of its own, rounded to the dtype, before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["ReduceOperation", "reduction_of"]

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
_PREMUL_SUM_NUMBER = len(_NUMBER_BY_OP)


@dataclass(frozen=True)
class ReduceOperation:
    """How numbers of one dtype become one.

    Attributes:
        number: Which operation, as an integer that all ranks agree on.
        name: What it is called.
        factor: What this rank's numbers are multiplied by first; None for 1.
    """

    number: int
    name: str
    _combine: Combine
    _dtype: torch.dtype
    _averages: bool
    factor: float | None = None

    def __call__(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Reduce ``sources``, one per rank and in their order, into ``out``.

        ``out`` may be the memory of the first or the second source, and of no other.
        """
        if self._dtype in _HALVES:
            out.copy_(self._folded([source.float() for source in sources], None))
            return
        self._folded(sources, out)

    @property
    def is_plain_sum(self) -> bool:
        """Whether numbers are added, and that is all."""
        return self._combine is torch.add and not self._averages

    def scaled(self, source: Tensor) -> Tensor:
        """Return what this rank gives: ``source`` itself, or where there is a factor, a product."""
        return source if self.factor is None else source * self.factor

    @property
    def stage(self) -> ReduceOperation:
        """How some of the ranks are reduced, where others follow: wide, and not averaged yet."""
        wide = torch.float32 if self._dtype in _HALVES else self._dtype
        return replace(self, _dtype=wide, _averages=False, factor=None)

    def of(self, source: Tensor) -> Tensor:
        """Return ``source`` in the dtype that is reduced: itself, or a wider copy."""
        return source.to(self._dtype)

    def finish(self, total: Tensor, num_ranks: int, out: Tensor) -> None:
        """Make of the last stage's ``total``, which may change, the result of ``num_ranks``."""
        self._average(total, num_ranks)
        out.copy_(total)

    def _average(self, total: Tensor, num_ranks: int) -> None:
        if self._averages:
            whole = None if total.is_floating_point() or total.is_complex() else "trunc"
            total.div_(num_ranks, rounding_mode=whole)

    def _folded(self, sources: Sequence[Tensor], out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty_like(sources[0])
        if len(sources) == 1:
            out.copy_(sources[0])
        else:
            self._combine(sources[0], sources[1], out=out)
        for source in sources[2:]:
            self._combine(out, source, out=out)
        self._average(out, len(sources))
        return out


def reduction_of(op: object, dtype: torch.dtype) -> ReduceOperation:
    """Return how to reduce numbers of ``dtype`` by a ``ReduceOp``.

    Raises:
        ConfigError: These numbers cannot be reduced so.
        UnsupportedError: This operation is not built.
    """
    reduction = _reduction_of(getattr(op, "op", op), dtype)
    return _scaling_sum(op, dtype) if reduction is None else reduction


def _scaling_sum(op: object, dtype: torch.dtype) -> ReduceOperation:
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(
            f"`op` must not scale {dtype}, but is PREMUL_SUM. Give numbers with fractions."
        )
    given = getattr(op, "factor", None)
    try:
        factor = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ConfigError(
            f"`op` must bring a real factor, but brings {given!r}. Give ReduceOp.PREMUL_SUM(0.5)."
        ) from exc
    plain = _reduction_of(ReduceOp.SUM, dtype)
    assert plain is not None
    return replace(plain, number=_PREMUL_SUM_NUMBER, name="PREMUL_SUM", factor=factor)


@cache
def _reduction_of(kind: object, dtype: torch.dtype) -> ReduceOperation | None:
    """Return what one kind of operation is, None for the one that brings a factor of its own."""
    if kind == ReduceOp.PREMUL_SUM:
        return None
    found = next((known for known in _COMBINE_BY_OP if known == kind), None)
    if found is None:
        raise UnsupportedError(
            "`op` must be SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM, but is "
            f"{kind}."
        )
    inexact = dtype.is_floating_point or dtype.is_complex
    if found in _BITWISE and inexact:
        raise ConfigError(f"`op` must be arithmetic for {dtype}, but is {kind}.")
    if found in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise ConfigError(f"`op` must not need an order for {dtype}, but is {kind}.")
    reduction = ReduceOperation(
        _NUMBER_BY_OP[found],
        str(kind).rpartition(".")[2],
        _COMBINE_BY_OP[found],
        dtype,
        found == ReduceOp.AVG,
    )
    try:  # here, where nothing was sent: what fails under way breaks the group
        one = torch.ones(1, dtype=dtype)
        reduction([one, one], torch.empty_like(one))
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(
            f"`op` must be one that torch has for {dtype}, but is {reduction.name}: {exc}."
        ) from exc
    return reduction
