"""Parameters in flat buffers: same values, same ties, same order in memory, and back again."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.memory import FlatParameters, in_memory_order


def flatten(module: nn.Module) -> FlatParameters:
    return FlatParameters(list(module.parameters()))


def test_values_stay_and_writing_to_the_buffer_trains_the_module() -> None:
    layer = nn.Linear(5, 3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    flat = flatten(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    flat.segments[0].values.fill_(2.0)
    assert layer(torch.ones(1, 5)).tolist() == [[12.0, 12.0, 12.0]]


def test_a_module_that_moved_away_is_noticed() -> None:
    layer = nn.Linear(5, 3)
    flat = flatten(layer)
    assert flat.intact()
    layer.to(torch.float64)
    assert not flat.intact()


@pytest.mark.parametrize("layout", ["sparse", "transposed", "other dtype"])
def test_gradients_come_in_the_parameters_order(layout: str) -> None:
    like = torch.zeros(3, 4)
    plain = torch.arange(12.0).view(3, 4)
    gradient = {
        "sparse": plain.to_sparse(),
        "transposed": plain.t().contiguous().t(),
        "other dtype": plain.to(torch.float64),
    }[layout]
    assert torch.equal(in_memory_order(gradient, like), torch.arange(12.0))


def test_buffers_hold_nothing_but_the_parameters_in_their_order() -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.LayerNorm(7))
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    (segment,) = flatten(net).segments
    assert torch.equal(segment.values, expected)
    assert segment.gradients.shape == expected.shape
    assert segment.starts == (0, 15, 18, 39, 46, 53)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_buffers_of_every_dtype(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2)).to(dtype)
    (segment,) = flatten(net).segments
    assert (segment.values.numel(), segment.values.dtype) == (8, dtype)
    assert segment.gradients.dtype == dtype


def test_ties_scalars_and_empty_parameters() -> None:
    net = nn.Module()
    net.a = nn.Parameter(torch.ones(2, 2))
    net.b = net.a
    net.empty = nn.Parameter(torch.zeros(0, 4))
    net.scalar = nn.Parameter(torch.tensor(7.0))
    flat = flatten(net)
    assert flat.segments[0].values.tolist() == [1.0] * 4 + [7.0]
    assert net.a is net.b
    assert flat.intact()


def test_channels_last_lies_in_the_order_of_memory() -> None:
    conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    flat = flatten(conv)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    in_memory = conv.weight.detach().permute(0, 2, 3, 1).flatten()
    assert torch.equal(flat.segments[0].values[: conv.weight.numel()], in_memory)


# --- gradients that stay --------------------------------------------------------------------------


def kept(module: nn.Module, values: list[Tensor | None] | None = None) -> FlatParameters:
    flat = flatten(module)
    flat.keep_gradients(values if values is not None else [None] * len(flat.parameters))
    return flat


def assert_gradients_are_flat(module: nn.Module, flat: FlatParameters) -> None:
    gradients = flat.segments[0].gradients
    assert torch.equal(torch.cat([p.grad.flatten() for p in module.parameters()]), gradients)
    for parameter, start in zip(module.parameters(), flat.segments[0].starts, strict=True):
        assert parameter.grad.data_ptr() == gradients.data_ptr() + start * gradients.itemsize


def test_gradients_begin_with_the_values_given_and_zeros_for_none() -> None:
    layer = nn.Linear(2, 1)
    flat = kept(layer, [torch.tensor([[5.0, 6.0]]), None])
    assert flat.segments[0].gradients.tolist() == [5.0, 6.0, 0.0]
    assert_gradients_are_flat(layer, flat)
    flat.keep_gradients([None, torch.tensor([3.0])])
    assert flat.segments[0].gradients.tolist() == [0.0, 0.0, 3.0]


FORGET = {
    "kept": lambda layer: None,
    "none": lambda layer: layer.zero_grad(set_to_none=True),
    "zero": lambda layer: layer.zero_grad(set_to_none=False),
    "one of them": lambda layer: setattr(layer.weight, "grad", None),
    "another tensor": lambda layer: setattr(layer.bias, "grad", torch.zeros(1)),
}


@pytest.mark.parametrize("forget", FORGET.values(), ids=FORGET.keys())
def test_backward_passes_write_where_the_gradients_lie(forget: Any) -> None:
    layer, x = nn.Linear(2, 1), torch.tensor([[2.0, 3.0]])
    flat = kept(layer)
    forget(layer)
    layer(x).sum().backward()
    assert flat.segments[0].gradients.tolist() == [2.0, 3.0, 1.0]
    assert_gradients_are_flat(layer, flat)
    layer(x).sum().backward()
    assert flat.segments[0].gradients.tolist() == [4.0, 6.0, 2.0]
    assert_gradients_are_flat(layer, flat)


def test_gradients_of_ties_add_up_in_one_place() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    twin = copy.deepcopy(net)
    flat = kept(net)
    net.zero_grad()
    for module in (net, twin):
        module(torch.tensor([[2.0, 3.0]])).sum().backward()
    assert torch.equal(flat.segments[0].gradients.view(2, 2), twin[0].weight.grad)


def test_a_parameter_that_takes_no_part_keeps_its_zeros() -> None:
    net = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    flat = kept(net)
    net[1](torch.ones(1, 2)).sum().backward()
    assert flat.segments[0].gradients.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_gradients_of_channels_last_weights_lie_as_the_weights_do() -> None:
    conv, x = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last), torch.randn(1, 3, 3, 3)
    twin = copy.deepcopy(conv)
    flat = kept(conv)
    conv.zero_grad()
    for module in (conv, twin):
        module(x).square().sum().backward()
    assert conv.weight.grad.stride() == conv.weight.stride()
    torch.testing.assert_close(conv.weight.grad, twin.weight.grad)
    assert conv.weight.grad.data_ptr() == flat.segments[0].gradients.data_ptr()


MOVE = {
    "double": lambda layer: layer.double(),
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "flat again": lambda layer: kept(layer),
}


@pytest.mark.parametrize("move", MOVE.values(), ids=MOVE.keys())
def test_a_parameter_that_has_moved_away_is_let_go(move: Any) -> None:
    layer = nn.Linear(2, 1)
    flat = kept(layer)
    move(layer)
    layer.zero_grad()
    x = torch.ones(1, 2, dtype=layer.weight.dtype)
    layer(x).sum().backward()
    assert flat.segments[0].gradients[:2].tolist() == [0.0, 0.0]
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
    assert layer.weight.grad.dtype == layer.weight.dtype


def test_flat_twice_gradients_lie_in_the_second() -> None:
    layer = nn.Linear(2, 1)
    kept(layer)
    second = kept(layer)
    for _ in range(2):
        layer.zero_grad()
        layer(torch.ones(1, 2)).sum().backward()
        assert second.segments[0].gradients.tolist() == [1.0, 1.0, 1.0]
        assert_gradients_are_flat(layer, second)


@pytest.mark.parametrize("keeps", [False, True])
def test_copies_of_a_flat_module_are_equal_and_independent(keeps: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].bias.requires_grad_(False)
    flat = kept(net) if keeps else flatten(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    copies.append(torch.load(file, weights_only=False))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    flat.segments[0].values.zero_()
    for each in copies:
        assert all(torch.equal(value, before[key]) for key, value in each.state_dict().items())
        each(torch.ones(1, 2)).sum().backward()
        again = flatten(each)
        assert again.segments[0].values.numel() == 9
        with torch.no_grad():
            each[0].weight.fill_(7.0)
        assert again.segments[0].values[:4].tolist() == [7.0] * 4
    assert flat.segments[0].gradients.count_nonzero() == 0
    assert flat.segments[0].values.count_nonzero() == 0
