"""Flat memory in parts: whole blocks, nothing twice, nothing left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan import Overlap, overlaps, part_bounds


def test_more_parts_than_blocks_leave_the_last_empty() -> None:
    assert part_bounds(130, 4, 64) == [(0, 64), (64, 128), (128, 130), (130, 130)]


def test_nothing_is_in_no_part() -> None:
    assert part_bounds(0, 2, 64) == [(0, 0), (0, 0)]


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 16, 64]))
def test_parts_tile_the_whole_at_blocks(total: int, parts: int, block: int) -> None:
    bounds = part_bounds(total, parts, block)
    assert len(bounds) == parts
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == total
    assert all(stop % block == 0 or stop == total for _, stop in bounds)


@given(st.lists(st.integers(0, 90), max_size=8), st.integers(1, 4))
def test_overlaps_cover_every_span_once(sizes: list[int], parts: int) -> None:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    covered: dict[int, list[int]] = {span: [] for span in range(len(sizes))}
    for low, high in part_bounds(total, parts, 16):
        for overlap in overlaps(starts, sizes, low, high):
            assert isinstance(overlap, Overlap)
            covered[overlap.span] += range(overlap.start, overlap.stop)
    assert covered == {span: list(range(size)) for span, size in enumerate(sizes)}
