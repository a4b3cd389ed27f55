"""The reductions of collectives: which there are, and of which numbers.

They reduce in the order of ranks, so all ranks get bitwise identical results in every run. Numbers
of 16 bits are reduced as float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.distributed.shared_memory import SUMMED_DTYPES
from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["ReduceKind", "reduction_of"]

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ReduceKind:
    """The reduction of one dtype."""

    name: str
    is_summed: bool  # by C: for a sum, or an average

    def combine(self, parts: Sequence[Tensor]) -> Tensor:
        """Return what the reduction makes of ``parts``, in their order; no average yet."""
        return reduce(_COMBINE[self.name], parts)

    def widen(self, flat: Tensor, num_hosts: int) -> Tensor:
        """Return the numbers to reduce: ``flat``, or a copy of its halves as float32.

        C adds halves up without a copy, and rounds once. A sum over several hosts is rounded later.
        """
        is_added = num_hosts == 1 and flat.dtype in SUMMED_DTYPES and self.name == "SUM"
        return flat.float() if flat.dtype in _HALVES and not is_added else flat

    def finish(self, total: Tensor, flat: Tensor, num_ranks: int) -> None:
        """Bring ``total`` to ``flat``, divided for an average; integers towards zero."""
        if self.name == "AVG":
            total.div_(num_ranks, rounding_mode=None if total.is_floating_point() else "trunc")
        if total is not flat:
            flat.copy_(total)


# Any: torch's options and operations have no types.
def reduction_of(opts: Any, dtype: torch.dtype) -> ReduceKind:
    """Return how a call with these options reduces numbers of ``dtype``, or refuse it."""
    op = ReduceOp.SUM if opts is None else opts.reduceOp
    return _reduction_of(getattr(op, "op", op), dtype)


@cache
def _reduction_of(op: Any, dtype: torch.dtype) -> ReduceKind:
    name = op.name
    if name not in _COMBINE:
        raise UnsupportedError(f"`op` must be {', '.join(_COMBINE)}, but is {name}.")
    kind = ReduceKind(name, name in ("SUM", "AVG") and dtype in (*_HALVES, *SUMMED_DTYPES))
    one = torch.zeros(1, dtype=torch.float32 if dtype in _HALVES else dtype)
    try:  # now, since a failure within the operation would break the group
        kind.finish(kind.combine([one, one]), one, 1)
    except RuntimeError as exc:
        raise ConfigError(f"`op` must be one that torch has for {dtype}, but is {name}.") from exc
    return kind
