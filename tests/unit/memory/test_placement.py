"""Memory that torch asks for, in the places that it was told."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from phalanx.ipc import Region
from phalanx.memory import Field, Placement

SIZES = [3 << 16, 5 << 14, 3 << 16]  # bytes
OFFSETS = [64, (3 << 16) + 128, (3 << 16) + (5 << 14) + 192]
TOTAL = OFFSETS[-1] + SIZES[-1]

pytestmark = pytest.mark.skipif(not Placement.hook(), reason="torch's calls cannot be replaced")


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(TOTAL) as region:
        yield region


@pytest.fixture
def placement() -> Placement:
    return Placement(OFFSETS, SIZES)


@pytest.fixture
def field(placement: Placement, region: Region) -> Field:
    found = placement.field(region.fd, region.nbytes)
    assert found is not None
    return found


def made(size: int, value: int = 0) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def learnt(placement: Placement, field: Field, kind: str = "a") -> None:
    """Let the first request of a body go to place 0, its third to place 2."""
    with placement.within(field, kind):
        kept = [made(SIZES[0]), made(SIZES[0]), made(SIZES[2])]
    placement.learn(kind, [kept[0].data_ptr(), 0, kept[2].data_ptr()])


def at(region: Region, place: int) -> list[int]:
    whole = region.tensor(torch.uint8, region.nbytes)
    return whole[OFFSETS[place] :][: SIZES[place]].unique().tolist()


def test_what_was_learnt_is_done(placement: Placement, field: Field, region: Region) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        kept = [made(SIZES[0], value) for value in (7, 8, 9)]
    assert [kept[0].data_ptr(), kept[2].data_ptr()] == [field.addresses[0], field.addresses[2]]
    assert (at(region, 0), at(region, 1), at(region, 2)) == ([7], [0], [9])
    assert (kept[1] == 8).all()
    assert field.taken() == 2
    del kept
    assert field.taken() == 0


def test_nothing_is_placed_before_it_was_learnt_or_in_bodies_of_another_kind(
    placement: Placement, field: Field
) -> None:
    learnt(placement, field)
    with placement.within(field, "b"):
        kept = [made(SIZES[0]) for _ in range(3)]
    kept += [made(SIZES[0]) for _ in range(3)]  # in no body
    assert field.taken() == 0


def test_a_place_in_use_is_given_to_nobody(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        first = made(SIZES[0], 5)
    with placement.within(field, "a"):
        second = made(SIZES[0], 6)
    assert first.data_ptr() == field.addresses[0] != second.data_ptr()
    assert (first == 5).all()


def test_a_request_of_another_size_has_no_turn(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        kept = [made(SIZES[0] + 1), made(SIZES[0] - 64), made(SIZES[0])]
    assert kept[2].data_ptr() == field.addresses[0]
    assert field.taken() == 1


def test_a_turn_with_another_places_size_gets_no_place(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        kept = made(SIZES[1])
    assert kept.data_ptr() not in field.addresses


def test_other_threads_are_left_alone(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    kept: list[Tensor] = []
    with placement.within(field, "a"):
        thread = threading.Thread(target=lambda: kept.append(made(SIZES[0])))
        thread.start()
        thread.join()
        assert field.taken() == 0
        kept.append(made(SIZES[0]))
    assert kept[1].data_ptr() == field.addresses[0]


def test_who_keeps_a_tensor_keeps_its_numbers(
    placement: Placement, field: Field, region: Region
) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        kept = [made(SIZES[0], 5), made(SIZES[0]), made(SIZES[2], 6)]
    field.part()
    whole = region.tensor(torch.uint8, region.nbytes)
    assert (at(region, 0), at(region, 2)) == ([5], [6])  # the file has them as well
    whole.fill_(1)
    assert [(each.min().item(), each.max().item()) for each in kept] == [(5, 5), (0, 0), (6, 6)]
    kept[0].fill_(2)
    assert at(region, 0) == [1]


def test_what_nobody_keeps_is_not_copied(
    placement: Placement, field: Field, region: Region
) -> None:
    learnt(placement, field)
    region.tensor(torch.uint8, region.nbytes).fill_(1)
    with placement.within(field, "a"):
        kept = made(SIZES[0], 5)
    field.part()
    assert [ctypes.string_at(address, 1)[0] for address in field.addresses] == [5, 0, 0]
    assert (at(region, 1), at(region, 2), bool((kept == 5).all())) == ([1], [1], True)


def test_no_later_turn_than_was_learnt_and_none_after_the_last_one_logged(
    placement: Placement, field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.memory.placement._MOST_REQUESTS", 2)
    learnt(placement, field)  # its third request was the last place's
    with placement.within(field, "a"):
        kept = [made(SIZES[0]) for _ in range(4)]
    assert kept[0].data_ptr() == field.addresses[0]
    assert field.taken() == 1


def test_a_body_that_raises_ends(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    with pytest.raises(ValueError, match="ended"), placement.within(field, "a"):
        raise ValueError("ended")
    kept = made(SIZES[0])
    assert (field.taken(), kept.data_ptr() in field.addresses) == (0, False)


def test_a_field_outlives_its_placement(region: Region) -> None:
    placement = Placement(OFFSETS, SIZES)
    field = placement.field(region.fd, region.nbytes)
    assert field is not None
    learnt(placement, field)
    with placement.within(field, "a"):
        kept = [made(SIZES[0], 3)]
    del placement
    _others = [array("q", [-1] * len(SIZES)) for _ in range(1000)]  # where its numbers lay
    assert field.taken() == 1
    kept.clear()
    assert field.taken() == 0


def test_fields_are_apart(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    with Region.create(TOTAL) as other:
        second = placement.field(other.fd, other.nbytes)
    assert second is not None
    with placement.within(second, "a"):
        kept = made(SIZES[0])
    assert (field.taken(), second.taken()) == (0, 1)
    assert kept.data_ptr() == second.addresses[0]


def test_a_forked_child_may_free_what_its_parent_keeps(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        kept = [made(SIZES[0], 3)]
    child = os.fork()
    if child == 0:
        kept.clear()
        os._exit(field.taken())
    assert os.waitpid(child, 0)[1] == 0
    assert (field.taken(), bool((kept[0] == 3).all())) == (1, True)


def test_a_child_forked_in_a_body_is_given_no_places(placement: Placement, field: Field) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        child = os.fork()
        kept = torch.empty(SIZES[0], dtype=torch.uint8)  # no work: a fork has no threads for it
        if child == 0:
            os._exit(field.taken())
    assert os.waitpid(child, 0)[1] == 0
    assert (field.taken(), kept.data_ptr()) == (1, field.addresses[0])


def test_what_a_forked_child_does_to_a_tensor_is_not_seen_here(
    placement: Placement, field: Field
) -> None:
    learnt(placement, field)
    with placement.within(field, "a"):
        kept = made(SIZES[0], 3).numpy()  # a fork has none of torch's threads
    child = os.fork()
    if child == 0:
        was = bool((kept == 3).all())
        kept[:] = 4
        os._exit(not was)
    assert os.waitpid(child, 0)[1] == 0
    assert (kept == 3).all()


def test_a_file_that_cannot_be_mapped_makes_no_field(placement: Placement) -> None:
    assert placement.field(-1, TOTAL) is None
