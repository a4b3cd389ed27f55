"""How one flat run of elements is divided among the threads that work on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.plan.slices import equal_sizes

__all__ = ["Overlap", "overlaps", "part_bounds"]


class Overlap(NamedTuple):
    """Elements ``start`` to ``stop`` of span ``span``, counted from its first element."""

    span: int
    start: int
    stop: int


def part_bounds(total: int, parts: int, block: int) -> list[tuple[int, int]]:
    """Divide ``total`` elements into ``parts`` ranges that meet at multiples of ``block``.

    Vector kernels treat the last few elements of an array apart. With borders at whole blocks (and
    a ``total`` of whole blocks) no part has such a tail, and the results do not depend on
    ``parts``.

    Example:
        >>> part_bounds(192, 2, 64)
        [(0, 128), (128, 192)]
    """
    bounds = []
    start = 0
    for blocks in equal_sizes(-(-total // block), parts):
        stop = min(total, start + blocks * block)
        bounds.append((start, stop))
        start = stop
    return bounds


def overlaps(starts: Sequence[int], sizes: Sequence[int], low: int, high: int) -> list[Overlap]:
    """Return what of each span (``starts``, ``sizes``) lies between ``low`` and ``high``.

    Example:
        >>> overlaps([0, 64], [10, 100], 64, 128)
        [Overlap(span=1, start=0, stop=64)]
    """
    found = []
    for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        first, last = max(start, low), min(start + size, high)
        if first < last:
            found.append(Overlap(index, first - start, last - start))
    return found
