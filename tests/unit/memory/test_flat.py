"""Parameters in flat buffers: same values, same ties, same order in memory, and back again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.memory import FlatParameters, in_memory_order


def flatten(module: nn.Module) -> FlatParameters:
    return FlatParameters([list(module.parameters())])


def test_values_stay_and_writing_to_the_buffer_trains_the_module() -> None:
    layer = nn.Linear(5, 3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    flat = flatten(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    flat.segments[0].values.fill_(2.0)
    assert layer(torch.ones(1, 5)).tolist() == [[12.0, 12.0, 12.0]]


def test_every_parameter_starts_at_64_bytes_and_buffers_are_whole_blocks() -> None:
    flat = flatten(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.LayerNorm(7)))
    (segment,) = flat.segments
    assert all(p.data_ptr() % 64 == 0 for p in flat.parameters)
    assert segment.values.numel() * 4 % 256 == 0
    assert segment.starts == (0, 16, 32, 64, 80, 96)


def test_padding_is_zero() -> None:
    flat = flatten(nn.Linear(5, 3))
    (segment,) = flat.segments
    mask = torch.ones_like(segment.values)
    for start, size in zip(segment.starts, segment.sizes, strict=True):
        mask[start : start + size] = 0
    assert (segment.values * mask).count_nonzero() == 0


def test_one_buffer_per_group_and_dtype() -> None:
    half, full = nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2)
    groups = [[half.weight, full.weight], [half.bias, full.bias]]
    segments = FlatParameters(groups).segments
    assert [(s.group, s.values.dtype, s.members) for s in segments] == [
        (0, torch.bfloat16, (0,)),
        (0, torch.float32, (1,)),
        (1, torch.bfloat16, (2,)),
        (1, torch.float32, (3,)),
    ]


def test_channels_last_stays_channels_last() -> None:
    conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    before = conv.weight.detach().clone()
    flat = flatten(conv)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(conv.weight, before)
    assert flat.gradient(0).stride() == conv.weight.stride()


def test_ties_are_kept() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    flat = flatten(net)
    assert len(flat.parameters) == 3
    assert net[1].weight is net[0].weight


def test_two_parameters_in_one_memory_are_refused_and_stay() -> None:
    first = nn.Parameter(torch.ones(3))
    second = nn.Parameter(first.data)
    with pytest.raises(ConfigError, match="must lie in memory of their own, but share it"):
        FlatParameters([[first, second]])
    assert first.data_ptr() == second.data_ptr()


def test_empty_and_scalar_parameters() -> None:
    empty, scalar = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(3.0))
    flat = FlatParameters([[empty, scalar]])
    assert (empty.shape, scalar.item()) == ((0, 4), 3.0)
    assert flat.intact()
    flat.release()
    assert scalar.item() == 3.0


def test_release_gives_memory_of_its_own() -> None:
    layer = nn.Linear(5, 3)
    flat = flatten(layer)
    weight = layer.weight.detach().clone()
    flat.release()
    flat.segments[0].values.zero_()
    assert torch.equal(layer.weight, weight)
    assert layer.weight.untyped_storage().nbytes() == 60


def test_a_module_that_moved_away_is_noticed() -> None:
    layer = nn.Linear(5, 3)
    flat = flatten(layer)
    assert flat.intact()
    layer.to(torch.float64)
    assert not flat.intact()


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_sum_all_gradients_once(num_parts: int) -> None:
    net = nn.Sequential(nn.Linear(11, 13), nn.Linear(13, 5))
    flat = flatten(net)
    left = [torch.randn(p.numel()) for p in flat.parameters]
    right = [torch.randn(p.numel()) for p in flat.parameters]
    for part in flat.parts(num_parts):
        part.sum_gradients([left, right])
    for index, parameter in enumerate(flat.parameters):
        expected = (left[index] + right[index]).view_as(parameter)
        assert torch.equal(flat.gradient(index), expected)


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
