"""Tensors as collectives take them: dense, on the CPU, flat and contiguous; and their checks.

The elements of any other dense tensor, also of one on a GPU, travel as a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.memory import has_memory, is_expanded
from phalanx.plan import check_argument

__all__ = [
    "NOTHING",
    "FlatTensor",
    "as_bytes",
    "check_count",
    "check_fit",
    "check_rank",
    "cut_by_rank",
    "cut_rows",
    "flat_of",
    "only",
    "output_of",
]

NOTHING = torch.empty(0, dtype=torch.uint8)
"""An empty tensor, sent to ranks that receive nothing."""


class FlatTensor(NamedTuple):
    """A tensor, and its elements in one line: its own memory, or a copy if they lie apart."""

    tensor: Tensor  # as the user gave it
    data: Tensor  # its elements in order, one dimension
    copied: bool

    def write_back(self) -> None:
        """Bring what is in ``data`` to the tensor, where that is a copy."""
        if self.copied:
            self.tensor.data.copy_(self.data.view(self.tensor.shape))


def flat_of(tensor: Tensor, name: str) -> FlatTensor:
    """Return ``tensor`` in one line; refuse one that is not dense."""
    is_plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    if not (is_plain and has_memory(tensor)):
        raise UnsupportedError(
            f"`{name}` must be dense and hold its numbers itself, but is a {type(tensor).__name__} "
            f"of {tensor.dtype} and layout {tensor.layout}. Give `.to_dense()`, `.dequantize()`, "
            "or the `to_local()` of a DTensor."
        )
    # As with gloo, autograd does not notice a write: what it has kept may be received into.
    plain = tensor.data
    if not (plain.is_cpu and plain.is_contiguous()) or plain.is_conj() or plain.is_neg():
        copy = plain.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        return FlatTensor(tensor, copy, True)
    return FlatTensor(tensor, plain if plain.dim() == 1 else plain.view(-1), False)


def output_of(tensor: Tensor, name: str) -> FlatTensor:
    """Return ``tensor``, which will be written to, in one line."""
    flat = flat_of(tensor, name)
    if flat.copied and is_expanded(tensor):
        raise ConfigError(
            f"`{name}` must have memory for each of its elements, but is expanded (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}). Give `.contiguous()` and keep it."
        )
    return flat


def as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a flat contiguous tensor."""
    # Of none or one element, torch takes any stride for contiguous, but not for a view.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


# --- the tensors of a call, and their parts by rank -----------------------------------------------


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


def cut_by_rank(size: int, whole: Tensor, part: Tensor, name: str, of: str) -> list[Tensor]:
    """Cut ``whole`` into a part for each rank, as large as ``part``; both are flat."""
    length = part.numel()
    if whole.numel() != size * length or whole.dtype != part.dtype:
        raise ConfigError(
            f"`{name}` must hold {size} times the elements of `{of}` ({length} × {part.dtype}), "
            f"but holds {whole.numel()} × {whole.dtype}."
        )
    return list(whole.view(size, length).unbind())


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
