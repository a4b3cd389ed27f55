"""The tensors of a call, checked and cut into parts by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError

__all__ = [
    "check_count",
    "check_fit",
    "check_rank",
    "cut_by_rank",
    "cut_rows",
    "only",
]


# Any, below: a tensor, or a list of them.
def only(tensors: Sequence[Any]) -> Any:
    """Return the single one of ``tensors``.

    Raises:
        UnsupportedError: There are more, or none.
    """
    if len(tensors) != 1:
        raise UnsupportedError(
            f"A call must concern one tensor per rank, but concerns {len(tensors)}. Call once for "
            "each."
        )
    return tensors[0]


def check_fit(one: Tensor, other: Tensor, name: str, of: str) -> None:
    """See that two tensors are of one length and dtype.

    Raises:
        ConfigError: They are not.
    """
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise ConfigError(
            f"`{name}` must hold as many elements as {of} ({other.numel()} × {other.dtype}), but "
            f"holds {one.numel()} × {one.dtype}."
        )


def check_count(size: int, tensors: Sequence[Tensor], name: str) -> None:
    """See that there is a tensor for each of ``size`` ranks.

    Raises:
        ConfigError: There are more, or fewer.
    """
    if len(tensors) != size:
        raise ConfigError(
            f"`{name}` must hold one tensor per rank ({size}), but holds {len(tensors)}."
        )


def check_rank(size: int, rank: int, name: str) -> None:
    """See that there is a rank of that number, before anything is sent.

    Raises:
        ConfigError: There is none.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"`{name}` must be a rank of the group (0 to {size - 1}), but is {rank}.")


def cut_by_rank(size: int, whole: Tensor, part: Tensor, *, filled: bool) -> list[Tensor]:
    """Cut an input, or an output that is filled, into one part per rank, each shaped as ``part``.

    Raises:
        ConfigError: It has another number of elements, or dtype, or is filled and its parts would
            be no views.
    """
    name, of = ("output", "input") if filled else ("input", "output")
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ConfigError(
            f"`{name}` must hold {size} times the elements of `{of}` ({part.numel()} × "
            f"{part.dtype}), but holds {whole.numel()} × {whole.dtype}."
        )
    if filled and not whole.is_contiguous():
        raise ConfigError("`output` must be contiguous, but is not. Give `.contiguous()`.")
    return list(whole.reshape(size, *part.shape).unbind())


def cut_rows(
    size: int, tensor: Tensor, flat: Tensor, counts: Sequence[int], name: str
) -> list[Tensor]:
    """Cut what lies in one line in ``flat`` into the rows of each rank.

    Args:
        size: How many ranks.
        tensor: As the user gave it.
        flat: Its elements in order.
        counts: How many rows each rank has; nothing for equally many.
        name: What ``counts`` is called in messages.

    Raises:
        ConfigError: The counts do not fit.
    """
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not counts:
        if num_rows % size:
            raise ConfigError(
                f"`{name}` must be given where {num_rows} rows cannot be cut in {size} equal "
                "parts, but is not."
            )
        counts = [num_rows // size] * size
    if len(counts) != size or sum(counts) != num_rows or min(counts) < 0:
        raise ConfigError(
            f"`{name}` must hold {size} numbers of rows, {num_rows} in all, but is {list(counts)}."
        )
    per_row = tensor.numel() // num_rows if num_rows else 0
    return list(flat.split([count * per_row for count in counts]))
