"""What a worker writes to a gradient buffer, and what is read from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from phalanx.execution.gradient_buffers import GradientBuffers
from phalanx.execution.gradient_writer import GradientWriter
from phalanx.memory.shared_memory_pool import SharedMemoryPool
from phalanx.replicas.packing import load, pack
from phalanx.replicas.statistics import Statistic, Statistics, StatisticSpec

WEIGHT = 3.0
SHAPES = [(5, 3), (0,), (7,), (131, 137)]  # the last is large enough to be copied by itself


@pytest.fixture
def pool() -> Iterator[SharedMemoryPool]:
    pool = SharedMemoryPool()
    yield pool
    pool.close()


def parameters(pool: SharedMemoryPool) -> list[nn.Parameter]:
    return [nn.Parameter(each) for each in pool.allocate_like([torch.zeros(s) for s in SHAPES])]


def specs_for(statistics: Statistics) -> list[StatisticSpec]:
    return [
        StatisticSpec(name, each.value.dtype, tuple(each.value.shape), each.rule)
        for name, each in statistics.items()
    ]


def statistics_of(**values: Tensor) -> Statistics:
    return {name: Statistic(value, WEIGHT, "mean") for name, value in values.items()}


def passed(
    buffers: GradientBuffers,
    gradients: list[Tensor | None],
    statistics: Statistics,
    *,
    wanted: bool = True,
) -> tuple[list[Tensor | None], Statistics, int]:
    """Send what a microbatch leaves; return it as it arrives, and the size of the message."""
    buffer = buffers.take()
    filler = GradientWriter(buffers.layout, buffers.pool)
    message = pack(filler.fill(buffer.region if wanted else -1, gradients, statistics))
    buffer = buffer if wanted else None
    return *load(message).read(buffer, buffers.layout.specs, WEIGHT), len(message)


def assert_same(found: Statistics, expected: Statistics) -> None:
    assert found.keys() == expected.keys()
    for name, statistic in expected.items():
        assert (found[name].weight, found[name].rule) == (statistic.weight, statistic.rule)
        assert found[name].value.dtype == statistic.value.dtype
        assert found[name].value.shape == statistic.value.shape
        assert torch.equal(found[name].value, statistic.value)


def test_gradients_arrive_in_the_order_of_their_memory(pool: SharedMemoryPool) -> None:
    buffers = GradientBuffers(parameters(pool), [], pool)
    gradients = [torch.randn(shape).flatten() for shape in SHAPES]
    found, statistics, size = passed(buffers, [gradients[0], None, None, gradients[3]], {})
    assert found[1] is found[2] is None
    assert torch.equal(found[0], gradients[0])
    assert torch.equal(found[3], gradients[3])
    assert (statistics, size < 1000) == ({}, True)


def test_statistics_of_every_dtype_and_shape_arrive(pool: SharedMemoryPool) -> None:
    statistics = statistics_of(
        wide=torch.randn(3, 5, dtype=torch.float64),
        count=torch.tensor(7),
        half=torch.randn(3).to(torch.bfloat16),
        flags=torch.tensor([True, False, True]),
        nothing=torch.empty(0, 4, dtype=torch.float16),
        pair=torch.randn(2, dtype=torch.complex64),
        strided=torch.randn(4, 6, dtype=torch.float64).t(),
        large=torch.randn(9000, dtype=torch.float64),
    )
    buffers = GradientBuffers(parameters(pool), specs_for(statistics), pool)
    assert [spec.name for spec in buffers.layout.specs] == [*[*statistics][:4], "pair", "strided"]
    found, size = passed(buffers, [None] * len(SHAPES), statistics)[1:]
    assert_same(found, statistics)
    assert size > statistics["large"].value.nbytes  # what is large has no place in a buffer
    found["wide"].value += 1  # it is the reader's own


def test_what_differs_from_its_head_or_has_none_arrives_too(pool: SharedMemoryPool) -> None:
    buffers = GradientBuffers(
        parameters(pool), specs_for(statistics_of(a=torch.ones(2), b=torch.ones(3))), pool
    )
    for statistics in (
        statistics_of(a=torch.ones(5)),
        statistics_of(b=torch.ones(3, dtype=torch.float64), c=torch.ones(1)),
        {"a": Statistic(torch.ones(2), WEIGHT, "first")},
        statistics_of(b=torch.full((3,), 4.0)),
        {},
    ):
        assert_same(passed(buffers, [None] * len(SHAPES), statistics)[1], statistics)


def test_where_no_gradients_are_wanted_statistics_arrive(pool: SharedMemoryPool) -> None:
    statistics = statistics_of(a=torch.ones(2))
    buffers = GradientBuffers(parameters(pool), specs_for(statistics), pool)
    gradients, found, _ = passed(buffers, [None] * len(SHAPES), statistics, wanted=False)
    assert gradients == [None] * len(SHAPES)
    assert_same(found, statistics)


def test_numbers_that_are_to_be_negated_arrive_as_they_are(pool: SharedMemoryPool) -> None:
    buffers = GradientBuffers(parameters(pool), [], pool)
    gradients = [torch._neg_view(torch.ones(shape).flatten()) for shape in SHAPES]
    found = passed(buffers, [*gradients], {})[0]
    for number in (0, 2, 3):
        assert torch.equal(found[number], -torch.ones(SHAPES[number]).flatten())


def test_who_keeps_a_gradient_keeps_its_numbers(pool: SharedMemoryPool) -> None:
    buffers = GradientBuffers(parameters(pool), [], pool)
    kept = [torch.ones(shape).flatten() for shape in SHAPES]
    for gradient in passed(buffers, [*kept], {})[0]:
        if gradient is not None:
            gradient.fill_(-1.0)
    assert all(bool((each == 1).all()) for each in kept)


def test_gradients_lie_as_the_parameters_do(pool: SharedMemoryPool) -> None:
    first, second = parameters(pool), parameters(pool)  # as the groups of an optimizer
    mixed = [first[2], second[3], first[0], second[1], second[0], first[3]]
    buffer = GradientBuffers(mixed, [], pool).take()
    for group in (first, second):
        pairs = [
            (parameter.data_ptr(), gradient.data_ptr())
            for parameter, gradient in zip(mixed, buffer.gradients, strict=True)
            if gradient is not None and any(parameter is each for each in group)
        ]
        assert len({theirs - ours for theirs, ours in pairs}) == 1
    assert buffer.gradients[3] is None


def test_a_slot_is_no_larger_than_the_parameters(pool: SharedMemoryPool) -> None:
    whole = pool.allocate(1 << 20, torch.float32, torch.device("cpu"))
    buffer = GradientBuffers([nn.Parameter(whole[5000:5003])], [], pool).take()
    assert buffer.gradients[0] is not None
    assert buffer.gradients[0].untyped_storage().nbytes() < 4096


def test_a_slot_that_is_made_in_inference_mode_may_be_written_outside(
    pool: SharedMemoryPool,
) -> None:
    with torch.inference_mode():
        buffer = GradientBuffers(
            parameters(pool), specs_for(statistics_of(a=torch.ones(2))), pool
        ).take()
    for each in (*buffer.gradients, *buffer.statistics):
        assert each is None or each.fill_(2.0).sum() > 0


def test_a_slot_is_taken_again_when_nobody_holds_it(pool: SharedMemoryPool) -> None:
    buffers = GradientBuffers(parameters(pool), [], pool)
    first, second = buffers.take(), buffers.take()
    regions = {first.region, second.region}
    assert len(regions) == 2
    del first, second
    assert {buffers.take().region for _ in range(5)} <= regions
