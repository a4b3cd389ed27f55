"""The kind of an operation: as one number that ranks can compare, and in words for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch

from phalanx.errors import StateError

__all__ = ["Fingerprint", "describe", "desync", "misfit", "pack", "unpack"]

_KINDS = (
    *("nothing", "all_reduce", "reduce", "broadcast", "all_gather"),
    *("gather", "scatter", "reduce_scatter", "all_to_all", "barrier"),
)
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_FOUND = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = tuple(sorted(_FOUND, key=str))
_NUMBER_BY_DTYPE = {dtype: number for number, dtype in enumerate(_DTYPES)}
_NO_ROOT = 0xFFFFFF


class Fingerprint(NamedTuple):
    """An operation, in numbers that must be equal on all ranks."""

    number: int  # in the group, from 1
    code: int  # kind, dtype, reduction and root; see :func:`pack`
    num_elements: int


def pack(
    kind: str,
    dtype: torch.dtype,
    *,
    reduction: str = "SUM",
    root: int | None = None,
    sizes: Sequence[int] = (),
) -> int:
    """Put what must agree into one number of 58 bits.

    A hash of ``sizes``, the parts of the ranks, takes the place of the root where they differ.

    Example:
        >>> unpack(pack("broadcast", torch.float32, root=2))
        ('broadcast', torch.float32, 'SUM', 2)
    """
    packed = _KINDS.index(kind) | _NUMBER_BY_DTYPE[dtype] << 8 | _REDUCTIONS.index(reduction) << 16
    if sizes and min(sizes) != max(sizes):
        return packed | _NO_ROOT + 1 + crc32(repr([*sizes]).encode()) << 24
    return packed | (_NO_ROOT if root is None else root) << 24


def unpack(packed: int) -> tuple[str, torch.dtype, str, int | None]:
    """Undo :func:`pack`."""
    root = packed >> 24
    return (
        _KINDS[packed & 0xFF],
        _DTYPES[packed >> 8 & 0xFF],
        _REDUCTIONS[packed >> 16 & 0xFF],
        None if root >= _NO_ROOT else root,
    )


def describe(fingerprint: Fingerprint) -> str:
    """Say an operation as ``all_reduce #7 (SUM of 1000 × float32)``."""
    number, code, num_elements = fingerprint
    if number == 0:
        return "no operation yet"
    kind, dtype, reduction, root = unpack(code)
    if kind == "barrier":
        return f"barrier #{number}"
    reduced = f"{reduction} of " if "reduce" in kind else ""
    at = "" if root is None else f", root {root}"
    name = str(dtype).removeprefix("torch.")
    return f"{kind} #{number} ({reduced}{num_elements} × {name}{at})"


def desync(rank: int, ours: Fingerprint, other: int, theirs: Fingerprint) -> StateError:
    """Return the error of ``rank``, which is in another operation than rank ``other``."""
    way_out = "Look for a call that only some ranks make."
    if ours.number == theirs.number and unpack(ours.code)[0] == unpack(theirs.code)[0]:
        way_out = "Give it tensors of the same sizes and dtype, one reduction and one root."
    return StateError(
        f"All ranks must make the same calls in the same order, but rank {rank} is in "
        f"{describe(ours)} and rank {other} in {describe(theirs)}. {way_out}"
    )


def misfit(rank: int, sender: int, taken_bytes: int) -> StateError:
    """Return the error of ``rank``, which takes so many bytes where another number is sent."""
    return StateError(
        f"`output_split_sizes` must fit what the others send, but rank {sender} sends another "
        f"number of elements to rank {rank} than that takes ({taken_bytes} bytes)."
    )
