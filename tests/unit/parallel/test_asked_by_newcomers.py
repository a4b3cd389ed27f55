"""What the first users stumbled over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx import AbstractParallel, ConfigError, DataParallel


class Route(AbstractParallel):
    """Sends every row to the expert that it names; takes two arguments."""

    def distribute(self, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
        rows, expert = inputs
        return [rows[expert == index] for index in range(len(self))]

    def merge(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs)


def test_a_tensor_is_a_columns_one_argument_also_when_the_container_has_two() -> None:
    shapes: list[tuple[int, ...]] = []
    with Route().add(nn.Linear(8, 3), "cpu").add(nn.Linear(8, 3), "cpu") as model:
        for index in range(2):
            model.get(index).register_forward_hook(lambda _, i, __: shapes.append(i[0].shape))
        x = torch.randn(3, 8)
        found = model(x, torch.tensor([0, 1, 0]))
        expected = torch.cat([model.get(0)(x[[0, 2]]), model.get(1)(x[[1]])])
    assert torch.allclose(found, expected, atol=1e-6)
    assert sorted(shapes[:2]) == [(1, 8), (2, 8)]


def test_what_is_held_can_be_merged_without_another_pass() -> None:
    net = nn.Linear(3, 2)
    first, second = torch.randn(5, 3), torch.randn(1, 3)
    with DataParallel(net, 3) as model:
        model(second).sum().backward()
        with model.no_sync():
            model(first).sum().backward()
        model.merge_gradients()
        model.merge_gradients()  # there is nothing left
    expected = (first.sum(0) + second.sum(0)).expand(2, 3)
    assert torch.allclose(net.weight.grad, expected, atol=1e-5)


@pytest.mark.parametrize("devices", ["auto", "cpu,cpu"])
def test_one_word_for_devices_is_refused_with_a_way_out_that_works(devices: str) -> None:
    with pytest.raises(ConfigError, match=r"Give 2, or \['cpu', 'cpu'\]"):
        DataParallel(nn.Identity(), devices)


def test_arguments_in_the_wrong_place_are_named() -> None:
    with pytest.raises(ConfigError, match="`layout` must be a `Layout`, but is 1"):
        DataParallel(nn.Identity(), layout=1)
    with (
        DataParallel(nn.Linear(2, 1), 2) as model,
        pytest.raises(ConfigError, match=r"`loss_fn` must be callable .* It comes first"),
    ):
        model.forward_loss(torch.ones(3, 2), torch.ones(3, 1), nn.functional.mse_loss)


def test_sharing_by_a_name_that_nothing_has_is_refused() -> None:
    model = DataParallel(nn.Linear(2, 1), 2)
    with pytest.raises(ConfigError, match=r"`names` .*'wieght' is none. `other` has weight, bias"):
        model.share(nn.Linear(2, 1), "wieght")
