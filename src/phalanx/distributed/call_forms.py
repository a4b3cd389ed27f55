"""The tensors of a call, checked and cut into parts by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan import check_argument

__all__ = ["check_count", "check_fit", "check_rank", "cut_by_rank", "cut_rows", "only"]


# Any, below: a tensor, or a list of them.
def only(tensors: Sequence[Any]) -> Any:
    """Return the single one of ``tensors``."""
    if len(tensors) != 1:
        raise UnsupportedError(
            f"A call must concern one tensor per rank, but concerns {len(tensors)}. Call once for "
            "each."
        )
    return tensors[0]


def check_fit(one: Tensor, other: Tensor, name: str, of: str) -> None:
    """Check that two tensors have the same length and dtype."""
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise ConfigError(
            f"`{name}` must hold as many elements as {of} ({other.numel()} × {other.dtype}), but "
            f"holds {one.numel()} × {one.dtype}."
        )


def check_count(size: int, tensors: Sequence[Tensor], name: str) -> None:
    """Check that there is a tensor for each of ``size`` ranks."""
    if len(tensors) != size:
        raise ConfigError(
            f"`{name}` must hold one tensor per rank ({size}), but holds {len(tensors)}."
        )


def check_rank(size: int, rank: int, name: str) -> None:
    """Check that there is a rank of that number, before anything is sent."""
    check_argument(0 <= rank < size, name, f"be a rank of the group (0 to {size - 1})", rank)


def cut_by_rank(size: int, whole: Tensor, part: Tensor, *, filled: bool) -> list[Tensor]:
    """Cut an input, or an output that is filled, into parts by rank, shaped as ``part``."""
    name, of = ("output", "input") if filled else ("input", "output")
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ConfigError(
            f"`{name}` must hold {size} times the elements of `{of}` ({part.numel()} × "
            f"{part.dtype}), but holds {whole.numel()} × {whole.dtype}."
        )
    if filled and not whole.is_contiguous():  # its parts would be no views
        raise ConfigError("`output` must be contiguous, but is not. Give `.contiguous()`.")
    return list(whole.reshape(size, *part.shape).unbind())


def cut_rows(
    size: int, tensor: Tensor, flat: Tensor, counts: Sequence[int], name: str
) -> list[Tensor]:
    """Cut ``flat``, the elements of ``tensor`` in order, into the rows of each rank.

    Without ``counts``, all ranks have equally many rows.
    """
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not counts:
        wanted = f"be given where {num_rows} rows cannot be cut in {size} equal parts"
        check_argument(num_rows % size == 0, name, wanted, counts)
        counts = [num_rows // size] * size
    fits = len(counts) == size and sum(counts) == num_rows and min(counts) >= 0
    check_argument(fits, name, f"hold {size} numbers of rows, {num_rows} in all", list(counts))
    per_row = tensor.numel() // num_rows if num_rows else 0
    return list(flat.split([count * per_row for count in counts]))
