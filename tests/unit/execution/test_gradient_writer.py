"""Gradients that torch makes in a slot, and those that come to lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from phalanx.execution.gradient_buffers import Slot, Slots
from phalanx.execution.gradient_writer import GradientWriter
from phalanx.memory import Field, Placement
from phalanx.memory.shared_memory_pool import SharedMemoryPool

SHAPES = [(5, 3), (131, 137), (131, 137), (0,), (131, 139)]  # the three large ones have places
COUNTS = [torch.Size(shape).numel() for shape in SHAPES]
ALIKE, LARGEST = COUNTS[1], COUNTS[4]

Gradients = list[Tensor | None]

pytestmark = pytest.mark.skipif(not Placement.hook(), reason="torch's calls cannot be replaced")


class Passing:
    """A filler and a slot, and what microbatches leave there."""

    def __init__(self, shelf: SharedMemoryPool) -> None:
        parameters = shelf.allocate_like([torch.zeros(shape) for shape in SHAPES])
        self.slots = Slots([nn.Parameter(each) for each in parameters], [], shelf)
        self.filler = GradientWriter(self.slots.layout, shelf)
        self.slot: Slot = self.slots.take()

    def run(self, make: Callable[[], Gradients]) -> Gradients:
        """Let ``make`` leave gradients; return what is in the slot."""
        with self.filler.receiving(self.slot.region, "run"):
            gradients = make()
        filling = self.filler.fill(self.slot.region, gradients, {}, "run")
        del gradients
        self.filler.settle(self.slot.region)
        return filling.read(self.slot, self.slots.layout.heads, 1.0)[0]

    @property
    def field(self) -> Field:
        found = self.filler._rooms[self.slot.region].field
        assert found is not None
        return found

    @property
    def places(self) -> bool:
        """Whether torch is told places still."""
        return self.filler._placement is not None

    def lies_there(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self.field.addresses


@pytest.fixture
def passing() -> Iterator[Passing]:
    shelf = SharedMemoryPool()
    yield Passing(shelf)
    shelf.close()


def values(start: float) -> list[float]:
    return [start + place for place in range(len(SHAPES))]


def plain(start: float) -> Gradients:
    """Return gradients of these values, and leave nothing else."""
    return [torch.full((n,), x) if n else None for n, x in zip(COUNTS, values(start), strict=True)]


def assert_told(found: Gradients, expected: list[float | None]) -> None:
    for gradient, count, value in zip(found, COUNTS, expected, strict=True):
        if value is None or not count:
            assert gradient is None
        else:
            assert gradient is not None
            assert torch.equal(gradient, torch.full((count,), value))


def test_after_the_first_microbatch_gradients_are_made_in_the_slot(passing: Passing) -> None:
    seen: list[list[bool]] = []

    def make() -> Gradients:
        gradients = plain(float(len(seen)))
        seen.append([each is not None and passing.lies_there(each) for each in gradients])
        return gradients

    for start in range(3):
        assert_told(passing.run(make), [*values(float(start))])
    assert seen[0] == [False] * 5
    assert seen[1] == seen[2] == [False, True, True, False, True]
    assert passing.field.taken() == 0


def test_gradients_that_lie_in_each_others_places_are_told_apart(passing: Passing) -> None:
    passing.run(lambda: plain(0.0))

    def swapped() -> Gradients:
        first, second, *_ = made = [torch.full((ALIKE,), x) for x in (7.0, 8.0)]
        assert all(passing.lies_there(each) for each in made)
        return [torch.full((15,), 1.0), second, first, None, torch.full((LARGEST,), 9.0)]

    assert_told(passing.run(swapped), [1.0, 8.0, 7.0, None, 9.0])
    assert_told(passing.run(swapped), [1.0, 8.0, 7.0, None, 9.0])  # now it is known
    assert passing.places


def test_one_gradient_in_the_place_of_another_that_is_missing(passing: Passing) -> None:
    passing.run(lambda: plain(0.0))
    found = passing.run(lambda: [None, None, torch.full((ALIKE,), 5.0), None, None])
    assert_told(found, [None, None, 5.0, None, None])
    assert passing.places


def test_what_is_kept_in_a_place_is_not_written_to(passing: Passing) -> None:
    passing.run(lambda: plain(0.0))
    kept: list[Tensor] = []

    def make() -> Gradients:
        kept.append(torch.full((ALIKE,), 3.0))  # in the turn of a gradient
        return plain(10.0)

    assert_told(passing.run(make), [*values(10.0)])
    assert passing.lies_there(kept[0])
    assert torch.equal(kept[0], torch.full((ALIKE,), 3.0))
    assert not passing.places
    assert_told(passing.run(lambda: plain(20.0)), [*values(20.0)])
    assert torch.equal(kept[0], torch.full((ALIKE,), 3.0))


def test_who_keeps_a_gradient_keeps_its_numbers(passing: Passing) -> None:
    passing.run(lambda: plain(0.0))
    kept: list[Tensor] = []

    def make() -> Gradients:
        gradients = plain(10.0)
        kept.extend(each for each in gradients if each is not None)
        return gradients

    found = passing.run(make)
    assert_told(found, [*values(10.0)])
    for each in found:  # as the executor's process, or another worker may
        if each is not None:
            each.fill_(-1.0)
    assert [each.unique().item() for each in kept] == [10.0, 11.0, 12.0, 14.0]
    assert_told(passing.run(lambda: plain(20.0)), [*values(20.0)])
    assert [each.unique().item() for each in kept] == [10.0, 11.0, 12.0, 14.0]


def test_without_parting_it_would_not(passing: Passing, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug that the tests before are there for."""
    monkeypatch.setattr(Field, "part", lambda _: None)
    passing.run(lambda: plain(0.0))
    kept: list[Tensor] = []

    def make() -> Gradients:
        kept.append(torch.full((ALIKE,), 3.0))
        return plain(10.0)

    passing.run(make)
    assert not torch.equal(kept[0], torch.full((ALIKE,), 3.0))


def test_a_body_that_raised_leaves_its_places_to_the_next_one(passing: Passing) -> None:
    passing.run(lambda: plain(0.0))

    def failing() -> Gradients:
        gradients = plain(5.0)
        raise ValueError(len(gradients))

    with pytest.raises(ValueError, match="5"):
        passing.run(failing)
    passing.filler.settle(passing.slot.region)
    assert_told(passing.run(lambda: plain(30.0)), [*values(30.0)])
    assert passing.field.taken() == 0


def test_numbers_that_are_to_be_negated_are_told_as_they_are(passing: Passing) -> None:
    passing.run(lambda: plain(0.0))

    def make() -> Gradients:
        gradients = plain(2.0)
        assert gradients[1] is not None
        gradients[1] = torch._neg_view(gradients[1])
        return gradients

    assert_told(passing.run(make), [2.0, -3.0, 4.0, None, 6.0])


def test_more_slots_than_one(passing: Passing) -> None:
    passing.run(lambda: plain(0.0))
    slots = [passing.slot, passing.slots.take(), passing.slots.take()]
    found = []
    for index, passing.slot in enumerate(slots):
        found.append(passing.run(lambda start=10.0 * index: plain(start)))  # type: ignore[misc]
    for index, each in enumerate(found):
        assert_told(each, [*values(10.0 * index)])
    assert passing.places


def test_who_wants_no_gradients_gets_none(passing: Passing) -> None:
    with passing.filler.receiving(-1, "run"):
        gradients = plain(1.0)
    assert not passing.filler.fill(-1, gradients, {}, "run").statistics
    passing.filler.settle(-1)
