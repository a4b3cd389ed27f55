"""TensorLoader: what an epoch holds, in which order, and who decides it."""

from __future__ import annotations

import pytest
import torch

from phalanx.cli.data import TensorLoader
from phalanx.cli.data.loader import ScalePixels, widen_tokens


def open_loader(num_rows: int = 7, *, batch_size: int = 3, seed: int = 5) -> TensorLoader:
    rows = torch.arange(num_rows)
    return TensorLoader(
        rows.view(-1, 1),
        rows * 10,
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )


def read_order(loader: TensorLoader) -> list[int]:
    return [row for inputs, _ in loader for row in inputs.flatten().tolist()]


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "sizes"),
    [
        (7, 3, [3, 3, 1]),
        (6, 3, [3, 3]),
        (2, 100, [2]),
        (1, 1, [1]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_nothing_is_dropped_and_the_last_batch_may_be_smaller(
    num_rows: int, batch_size: int, sizes: list[int]
) -> None:
    loader = open_loader(num_rows, batch_size=batch_size)
    batches = list(loader)
    assert [len(inputs) for inputs, _ in batches] == sizes
    assert len(loader) == len(sizes)
    assert sorted(row for inputs, _ in batches for row in inputs.flatten().tolist()) == list(
        range(num_rows)
    )
    for inputs, targets in batches:
        assert torch.equal(targets, inputs.flatten() * 10)


def test_the_seed_decides_the_order_and_every_epoch_has_its_own() -> None:
    loader, same, other = open_loader(50), open_loader(50), open_loader(50, seed=6)
    first, second = read_order(loader), read_order(loader)
    assert first == read_order(same)
    assert second == read_order(same)
    assert len({tuple(first), tuple(second), tuple(read_order(other)), tuple(range(50))}) == 4


def test_putting_the_generator_back_repeats_the_epoch() -> None:
    loader = open_loader(50)
    read_order(loader)
    assert loader.generator is not None
    state = loader.generator.get_state()
    order = read_order(loader)
    loader.generator.set_state(state)
    assert read_order(loader) == order


def test_the_order_is_drawn_by_iter_and_not_by_the_first_next() -> None:
    loader = open_loader(50)
    assert loader.generator is not None
    state = loader.generator.get_state()
    batches = iter(loader)
    assert not torch.equal(loader.generator.get_state(), state)
    after = loader.generator.get_state()
    list(batches)
    assert torch.equal(loader.generator.get_state(), after)


def test_without_shuffling_rows_come_as_they_lie_and_nothing_is_drawn() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(7)
    loader = TensorLoader(rows, rows, batch_size=2, shuffle=False, generator=generator)
    before = generator.get_state()
    assert read_order(loader) == list(range(7))
    assert loader.generator is None
    assert torch.equal(generator.get_state(), before)


def test_the_default_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    read_order(open_loader())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_does_not_share_memory_with_the_data() -> None:
    rows = torch.arange(4.0)
    loader = TensorLoader(rows, rows, batch_size=4, shuffle=False, generator=None)
    for inputs, targets in loader:
        inputs.zero_()
        targets.zero_()
    assert rows.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_its_repr_says_rows_batches_and_order() -> None:
    assert repr(open_loader()) == "TensorLoader(7 rows, batches of 3, shuffled)"


def test_pixels_are_scaled_to_zero_mean_and_a_range_of_one() -> None:
    pixels = torch.tensor([[0, 16], [4, 12]], dtype=torch.uint8)
    scale = ScalePixels.fitted_to(pixels, highest=16)
    inputs, targets = scale(pixels, torch.tensor([1, 0], dtype=torch.uint8))
    assert inputs.tolist() == [[-0.5, 0.5], [-0.25, 0.25]]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert pixels.tolist() == [[0, 16], [4, 12]]


def test_tokens_are_widened_to_int64() -> None:
    inputs, targets = widen_tokens(torch.tensor([255], dtype=torch.uint8), torch.ones(1).byte())
    assert (inputs.tolist(), targets.tolist()) == ([255], [1])
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
