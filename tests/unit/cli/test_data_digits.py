"""The digits in the package: all there, split alike by class, and small."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch

from phalanx.cli.data import TensorLoader, open_data
from phalanx.cli.data.digits import mark_test_rows


def read_all(loader: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(loader, TensorLoader)
    inputs, targets = zip(*loader, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def test_all_1797_digits_are_in_one_of_the_two_sets() -> None:
    data = open_data("digits", batch_size=100, seed=0)
    train_inputs, train_targets = read_all(data.train)
    test_inputs, test_targets = read_all(data.test)
    assert len(train_inputs) + len(test_inputs) == 1797
    assert (data.kind, data.input_shape, data.num_classes) == ("images", (1, 8, 8), 10)
    assert train_inputs.shape[1:] == test_inputs.shape[1:] == (1, 8, 8)
    # Counts per class as published with the data set.
    counts = torch.bincount(torch.cat([train_targets, test_targets]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    share = torch.bincount(test_targets) / counts
    assert ((share > 0.19) & (share <= 0.2)).all()


def test_pixels_are_about_zero_and_span_one() -> None:
    inputs, _ = read_all(open_data("digits", batch_size=2000, seed=0).train)
    assert inputs.dtype == torch.float32
    assert abs(inputs.mean().item()) < 1e-5
    assert (inputs.max() - inputs.min()).item() == pytest.approx(1.0)


def test_the_first_digit_is_the_published_one() -> None:
    train = open_data("digits", batch_size=1, seed=0).train
    assert isinstance(train, TensorLoader)
    assert train.inputs[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert train.targets[0].item() == 0


def test_the_seed_decides_the_order_but_not_the_split() -> None:
    one, other = (open_data("digits", batch_size=2000, seed=seed) for seed in (1, 2))
    assert torch.equal(read_all(one.test)[0], read_all(other.test)[0])
    targets, other_targets = read_all(one.train)[1], read_all(other.train)[1]
    assert not torch.equal(targets, other_targets)
    assert torch.equal(targets.sort().values, other_targets.sort().values)


def test_another_share_may_be_kept_for_the_test_set() -> None:
    data = open_data("digits", batch_size=10, seed=0, test_fraction=0.5)
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(read_all(data.test)[0]) == sum(count // 2 for count in counts)


@pytest.mark.parametrize(
    ("labels", "fraction", "marked"),
    [
        ([0] * 5, 0.2, [4]),
        ([0] * 15, 0.2, [4, 9, 14]),
        ([1, 1, 0, 0], 0.5, [1, 3]),
        ([0, 1, 2], 0.5, []),
        ([0] * 4, 0.75, [1, 2, 3]),
    ],
)
def test_the_split_takes_the_same_share_of_every_class(
    labels: list[int], fraction: float, marked: list[int]
) -> None:
    assert mark_test_rows(torch.tensor(labels), fraction).nonzero().flatten().tolist() == marked


def test_the_shipped_file_is_small_and_names_source_and_licence() -> None:
    assets = files("phalanx.cli") / "assets"
    assert len((assets / "digits.csv.gz").read_bytes()) < 150_000
    text = (assets / "digits.txt").read_text(encoding="utf-8")
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text
