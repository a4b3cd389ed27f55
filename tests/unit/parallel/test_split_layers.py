from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.model_parallel import ModelParallel
from phalanx.parallel.on_device import OnDevice
from phalanx.parallel.split_layers import split_conv, split_linear, unsplit

CONVS = {
    "one dim": (nn.Conv1d(3, 7, 3, stride=2, padding=1), (2, 3, 9)),
    "two dims": (nn.Conv2d(3, 7, (3, 5), padding="same", padding_mode="reflect"), (2, 3, 9, 8)),
    "three dims": (nn.Conv3d(2, 7, 3, dilation=2, bias=False), (2, 2, 7, 6, 5)),
    "transposed, one dim": (nn.ConvTranspose1d(3, 7, 3, stride=2, output_padding=1), (2, 3, 5)),
    "transposed, two dims": (nn.ConvTranspose2d(3, 7, 3, bias=False), (2, 3, 5, 4)),
    "transposed, three dims": (nn.ConvTranspose3d(2, 7, 3, padding=1), (2, 2, 4, 3, 5)),
}


def same_tensors(left: nn.Module, right: nn.Module) -> bool:
    left_state, right_state = left.state_dict(), right.state_dict()
    return left_state.keys() == right_state.keys() and all(
        torch.equal(left_state[key], right_state[key]) for key in left_state
    )


class TestSplit:
    @pytest.mark.parametrize(
        ("parts", "sizes"),
        [
            (1, [7]),
            (2, [4, 3]),
            (3, [3, 2, 2]),
            (7, [1] * 7),
            ([7], [7]),
            ((1, 5, 1), [1, 5, 1]),
            (torch.Size([2, 5]), [2, 5]),
        ],
    )
    def test_columns_have_the_sizes_that_were_asked_for(self, parts, sizes):
        layer = nn.Linear(3, 7)
        columns = split_linear(layer, parts)
        assert [column.out_features for column in columns] == sizes
        assert [column.weight.shape for column in columns] == [(size, 3) for size in sizes]
        x = torch.randn(5, 3)
        torch.testing.assert_close(torch.cat([column(x) for column in columns], -1), layer(x))

    @pytest.mark.parametrize("kind", CONVS)
    def test_columns_of_a_convolution_make_its_channels(self, kind):
        conv, shape = CONVS[kind]
        x = torch.randn(shape)
        columns = split_conv(conv, [2, 4, 1])
        assert [column.out_channels for column in columns] == [2, 4, 1]
        torch.testing.assert_close(torch.cat([column(x) for column in columns], 1), conv(x))
        one = x[0]  # without a batch dim
        torch.testing.assert_close(torch.cat([column(one) for column in columns], 0), conv(one))

    def test_values_are_copied_and_the_layer_stays_as_it_is(self):
        layer = nn.Linear(3, 5)
        before = copy.deepcopy(layer.state_dict())
        state = torch.get_rng_state()
        columns = split_linear(layer, 2)
        assert torch.equal(state, torch.get_rng_state())  # nothing was initialised at random
        with torch.no_grad():
            for column in columns:
                column.weight.zero_()
                column.bias.zero_()
        assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())
        assert layer.out_features == 5

    def test_columns_own_just_their_share_of_memory(self):
        column = split_conv(nn.ConvTranspose2d(3, 8, 3), 4)[1]
        assert column.weight.untyped_storage().nbytes() == column.weight.numel() * 4

    def test_columns_take_over_how_the_layer_is_set(self):
        layer = nn.Conv2d(3, 6, 3, stride=2, padding=1, dilation=2, padding_mode="circular")
        layer = layer.double().eval().to(memory_format=torch.channels_last)
        layer.bias.requires_grad_(False)
        layer.note = "first"
        layer.weight.grad = torch.ones_like(layer.weight)
        for column in split_conv(layer, 2):
            assert type(column) is nn.Conv2d
            assert (column.stride, column.padding, column.dilation) == ((2, 2), (1, 1), (2, 2))
            assert column.padding_mode == "circular"
            assert column.note == "first"
            assert column.weight.dtype == column.bias.dtype == torch.float64
            assert column.weight.requires_grad
            assert column.weight.is_leaf
            assert not column.bias.requires_grad
            assert not column.training
            assert column.weight.is_contiguous(memory_format=torch.channels_last)
            assert column.weight.grad is None

    def test_columns_lie_where_the_layer_lies(self):
        columns = split_linear(nn.Linear(3, 4, device="meta"), 2)
        assert all(column.weight.device.type == "meta" for column in columns)

    def test_a_layer_without_bias_gives_columns_without(self):
        assert [column.bias for column in split_linear(nn.Linear(3, 4, bias=False), 2)] == [
            None
        ] * 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("parts", "error"),
        [
            (0, r"`parts` must be 1 to 3 columns.*is 0"),
            (-1, r"is -1"),
            (4, r"1 to 3 columns, as the layer has 3 output features, but is 4"),
            ([], r"make 3 output features together, but is \[\]"),
            ([2, 2], r"make 3 output features together, but is \[2, 2\]"),
            ([1, 1], r"is \[1, 1\]"),
            ([3, 0], r"sizes of at least 1.*is \[3, 0\]"),
            ([4, -1], r"is \[4, -1\]"),
            ([1.0, 2.0], r"number of columns or their sizes, but is \[1.0, 2.0\]"),
            (2.0, r"number of columns or their sizes, but is 2.0"),
            ("12", r"number of columns or their sizes, but is '12'"),
        ],
    )
    def test_parts_that_do_not_cut_the_features(self, parts, error):
        with pytest.raises(ConfigError, match=error):
            split_linear(nn.Linear(2, 3), parts)
        with pytest.raises(ConfigError, match=error):
            split_conv(nn.Conv2d(2, 3, 1), parts)

    def test_another_kind_of_layer(self):
        with pytest.raises(
            ConfigError, match=r"`nn.Linear`, but is 'Conv2d'. Call `split_conv\(\)`"
        ):
            split_linear(nn.Conv2d(2, 3, 1), 2)
        with pytest.raises(
            ConfigError, match=r"convolution, but is 'Linear'. Call `split_linear\("
        ):
            split_conv(nn.Linear(2, 3), 2)
        with pytest.raises(ConfigError, match=r"convolution, but is 'Tanh'\.$"):
            split_conv(nn.Tanh(), 2)

    def test_groups(self):
        with pytest.raises(UnsupportedError, match=r"1 group.*has 2: every column gets the whole"):
            split_conv(nn.Conv2d(2, 4, 1, groups=2), 2)

    def test_what_a_column_would_do_differently_from_the_layer(self):
        class Scaled(nn.Linear):
            def forward(self, x):
                return super().forward(x) * self.out_features

        hooked = nn.Linear(2, 4)
        hooked.register_forward_hook(lambda module, args, output: output.softmax(-1))
        for layer, error in (
            (Scaled(2, 4), r"`nn.Linear` itself, but is of its subclass 'Scaled'"),
            (nn.LazyLinear(4), r"subclass 'LazyLinear'.*Run it once on a sample batch first"),
            (parametrizations.weight_norm(nn.Linear(2, 4)), r"ParametrizedLinear"),
            (prune.l1_unstructured(nn.Linear(2, 4), "weight", 0.5), r"bias, weight_mask, weight_o"),
            (hooked, r"`layer` must have no hooks.*register them on the columns"),
        ):
            with pytest.raises(UnsupportedError, match=error):
                split_linear(layer, 2)


class TestUnsplit:
    @pytest.mark.parametrize("kind", CONVS)
    @pytest.mark.parametrize("parts", [1, 3, [4, 1, 2]])
    def test_a_convolution_comes_back_to_the_bit(self, kind, parts):
        conv, _ = CONVS[kind]
        back = unsplit(split_conv(conv, parts))
        assert type(back) is type(conv)
        assert repr(back) == repr(conv)
        assert same_tensors(back, conv)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_a_linear_layer_comes_back_to_the_bit(self, bias, dtype):
        layer = nn.Linear(3, 7, bias=bias, dtype=dtype).requires_grad_(False).eval()
        back = unsplit(split_linear(layer, [1, 4, 2]))
        assert repr(back) == repr(layer)
        assert same_tensors(back, layer)
        assert not back.weight.requires_grad
        assert not back.training

    def test_values_are_copied(self):
        columns = split_linear(nn.Linear(3, 4), 2)
        unsplit(columns).weight.data.zero_()
        assert all(column.weight.count_nonzero() for column in columns)
        assert columns[0].out_features == 2

    def test_the_layer_lies_where_the_first_column_lies(self):
        columns = [nn.Linear(3, 2, device="meta"), nn.Linear(3, 1)]
        assert unsplit(columns).weight.device.type == "meta"

    def test_columns_may_come_in_a_container_and_wrapped(self):
        layer = nn.Linear(3, 5)
        columns = split_linear(layer, 3)
        container = ModelParallel(-1)
        wrapped = DataParallel(columns[0], 2), OnDevice(columns[1], "cpu"), columns[2]
        for column in wrapped:
            container.add(column, "cpu")
        assert same_tensors(unsplit(container), layer)
        assert same_tensors(unsplit(nn.ModuleList(columns)), layer)
        assert same_tensors(unsplit(tuple(columns)), layer)

    @pytest.mark.parametrize(
        ("other", "error"),
        [
            (nn.Conv1d(3, 2, 1), r"Column 1 must have `type` 'Linear' like column 0, .* 'Conv1d'"),
            (nn.Linear(4, 2), r"Column 1 must have `in_features` 3 like column 0, but has 4"),
            (nn.Linear(3, 2, bias=False), r"Column 1 must have `bias` True"),
            (nn.Linear(3, 2).half(), r"`weight.dtype` torch.float32 .* torch.float16"),
            (nn.Linear(3, 2).requires_grad_(False), r"`weight.requires_grad` True"),
            (nn.Sequential(nn.Linear(3, 2)), r"Column 1 must be a linear .* but is 'Sequential'"),
        ],
    )
    def test_a_column_that_is_none_of_the_layers_is_named(self, other, error):
        with pytest.raises(ConfigError, match=error):
            unsplit([nn.Linear(3, 2), other, nn.Linear(3, 2)])

    @pytest.mark.parametrize(
        ("setting", "value"),
        [("stride", 2), ("padding", 1), ("dilation", 2), ("kernel_size", 1), ("in_channels", 1)],
    )
    def test_a_column_set_differently_is_named(self, setting, value):
        settings = {"in_channels": 3, "out_channels": 2, "kernel_size": 3}
        same, other = nn.Conv2d(**settings), nn.Conv2d(**(settings | {setting: value}))
        with pytest.raises(ConfigError, match=rf"Column 2 must have `{setting}`"):
            unsplit([same, same, other])

    def test_a_column_that_computes_more_is_refused(self):
        hooked = nn.Linear(3, 2)
        hooked.register_forward_pre_hook(lambda module, args: None)
        with pytest.raises(UnsupportedError, match=r"Column 1 must have no hooks"):
            unsplit([nn.Linear(3, 2), hooked])

    def test_no_columns(self):
        with pytest.raises(ConfigError, match=r"at least one column, but is empty"):
            unsplit([])
        with pytest.raises(ConfigError, match=r"at least one column, but is empty"):
            unsplit(ModelParallel(0))
        with pytest.raises(ConfigError, match=r"columns in a list, but is 'Linear'"):
            unsplit(nn.Linear(3, 2))
